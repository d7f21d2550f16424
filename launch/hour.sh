#!/usr/bin/env bash
# experiment=smollm2_dspark_hour from prompts to its table: answers, features, an hour of training, measuring beside the
# demo's drafter (run `make demo` first). Every stage finds its own finished work, so an interrupted run goes on.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
# One process on the CPU: said explicitly, so that accelerate neither asks nor warns.
export DS_ACCELERATOR=cpu  # silences a search for GPUs
launch=("$bin/accelerate" launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no)

$bin/python generate.py experiment=smollm2_dspark_hour
"${launch[@]}" extract.py experiment=smollm2_dspark_hour
"${launch[@]}" train.py experiment=smollm2_dspark_hour model=dspark
$bin/python eval.py experiment=smollm2_dspark_hour "compare=[outputs/demo/checkpoints]"
