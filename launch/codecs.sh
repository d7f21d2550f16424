#!/usr/bin/env bash
# What a smaller store costs: the demo's drafter trained on stores of three roundings, three seeds each, one table.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
run=outputs/codecs
# One process on the CPU: said explicitly, so that accelerate neither asks nor warns.
export DS_ACCELERATOR=cpu  # silences a search for GPUs
launch=("$bin/accelerate" launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no)

$bin/python generate.py experiment=demo
# Features and last hidden states.
stores=("bf16 bf16" "fp8 fp8" "nf4 fp8")
drafters=()
for types in "${stores[@]}"; do
  read -r features last_hidden <<< "$types"
  store=$run/$features/store
  "${launch[@]}" extract.py experiment=demo name=codecs feature_dtype="$features" last_hidden_dtype="$last_hidden" \
    responses=outputs/demo/responses.jsonl captured=outputs/demo/captured store="$store"
  for seed in 1 2 3; do
    "${launch[@]}" train.py experiment=demo model=dspark name="codecs/$features/$seed" seed=$seed store="$store"
    drafters+=("$run/$features/$seed/checkpoints")
  done
done

measure=(experiment=demo temperature=0 num_draft_tokens=null check_transformers=0)
rest=$(IFS=,; echo "${drafters[*]:1}")
$bin/python eval.py "${measure[@]}" name=codecs draft="${drafters[0]}" "compare=[$rest]" > /dev/null
for features in bf16 fp8 nf4; do  # one drafter, fed features of each rounding
  $bin/python eval.py "${measure[@]}" name="codecs/fed_$features" draft="${drafters[0]}" feature_dtype=$features > /dev/null
done
$bin/python -m tests.codec_table
