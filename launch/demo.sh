#!/usr/bin/env bash
# The whole path on the embedded target. Every stage finds its own finished work, so an interrupted demo goes on.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
run=outputs/demo
mkdir -p $run/stages
cp .venv/setup.json $run/stages/setup.json

extra=()
if [[ -n ${PROMPTS_DIR:-} ]]; then
  extra=("prompts_dir=$PROMPTS_DIR" "extra_tasks=[gsm8k,humaneval,mt-bench]")
fi
# One process on the CPU: said explicitly, so that accelerate neither asks nor warns.
export DS_ACCELERATOR=cpu  # silences a search for GPUs
launch=("$bin/accelerate" launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no)

$bin/python generate.py experiment=demo
"${launch[@]}" extract.py experiment=demo
"${launch[@]}" train.py experiment=demo model=dspark
$bin/python eval.py experiment=demo "${extra[@]}" > /dev/null
$bin/python export.py experiment=demo > /dev/null
cat $run/summary.md
echo "The report is $run/eval/report.html; vLLM loads $run/export, whose README.md says how."
