#!/usr/bin/env bash
# Prints one fact of an exported drafter folder: launch/drafter_kind.sh DRAFTER vllm|sglang|drafts
# vllm: its method there; sglang: its algorithm there; drafts: how many tokens it was trained to draft.
set -euo pipefail
config=$1/config.json
if [[ ! -f $config ]]; then
  echo "$config: no such file; name a folder of export.py" >&2
  exit 2
fi
field() { # of the first line that has it: export.py writes a line for each field
  sed -nE "s/^ *\"$1\": \"?([A-Za-z0-9_]+)\"?,?\$/\1/p" "$config" | head -n 1
}
case $(grep -oE -m 1 '"(Qwen3DSparkModel|Gemma4DSparkModel|DSparkDraftModel|DFlashDraftModel|DFlash2DraftModel|LlamaForCausalLMEagle3|Eagle3Qwen3ForCausalLM|Eagle3DraftModel)"' "$config") in
  *DSpark*) kind=dspark ;;
  *DFlash*) kind=dflash ;;
  *Eagle3*) kind=eagle3 ;;
  *)
    echo "$config: no architecture that an engine serves; export it with engine=vllm, speculators or sglang" >&2
    exit 2
    ;;
esac
case $2 in
  vllm) echo "$kind" ;;
  sglang) echo "${kind^^}" ;;
  drafts)
    drafts=$(field speculative_tokens)
    [[ -n $drafts ]] || drafts=$(field ttt_length)
    if [[ -z $drafts ]]; then
      drafts=$(field block_size)
      [[ $kind == dflash ]] && drafts=$((drafts - 1)) # the block holds the known token, too
    fi
    echo "$drafts"
    ;;
esac
