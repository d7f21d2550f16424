#!/usr/bin/env bash
# Serves a target with a drafter in vLLM: launch/serve_vllm.sh TARGET DRAFTER [options of vllm serve ...]
# DRAFTER: a folder of export.py engine=vllm or engine=speculators. NUM_DRAFT_TOKENS: as trained, unless set.
set -euo pipefail
if (($# < 2)); then
  sed -n '2,3s/^# //p' "$0" >&2
  exit 2
fi
target=$1 drafter=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
method=$("$here/drafter_kind.sh" "$drafter" vllm)
drafts=${NUM_DRAFT_TOKENS:-$("$here/drafter_kind.sh" "$drafter" drafts)}
if [[ $method == dspark ]] || grep -q '"DFlash2DraftModel"' "$drafter/config.json"; then # only that runner has them
  export VLLM_USE_V2_MODEL_RUNNER=${VLLM_USE_V2_MODEL_RUNNER:-1}
fi
if ! command -v vllm > /dev/null; then
  echo "vllm: not installed here; pip install vllm, or activate the environment that has it" >&2
  exit 2
fi
# Without a method vLLM goes by words in the folder's path; without the last field it drafts greedily.
exec vllm serve "$target" "$@" --speculative-config \
  "{\"method\": \"$method\", \"model\": \"$drafter\", \"num_speculative_tokens\": $drafts, \"draft_sample_method\": \"probabilistic\"}"
