#!/usr/bin/env bash
# EAGLE-3, DFlash and DSpark on the demo's answers: equal data, equal optimiser steps, one table.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
run=outputs/drafters
drafters=(dspark dflash eagle3)
# One process on the CPU: said explicitly, so that accelerate neither asks nor warns.
export DS_ACCELERATOR=cpu  # silences a search for GPUs
launch=("$bin/accelerate" launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no)

$bin/python generate.py experiment=demo
"${launch[@]}" extract.py experiment=demo
for drafter in "${drafters[@]}"; do
  "${launch[@]}" train.py experiment=demo model="$drafter" name="drafters/$drafter" store=outputs/demo/store
done
$bin/python eval.py experiment=demo name=drafters temperature=0 num_draft_tokens=null \
  draft=$run/dspark/checkpoints "compare=[$run/dflash/checkpoints,$run/eagle3/checkpoints]"
