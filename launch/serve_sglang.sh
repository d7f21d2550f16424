#!/usr/bin/env bash
# Serves a target with a drafter in SGLang: launch/serve_sglang.sh TARGET DRAFTER [options of its launch_server ...]
# DRAFTER: a folder of export.py engine=sglang. NUM_DRAFT_TOKENS: as trained, unless set.
set -euo pipefail
if (($# < 2)); then
  sed -n '2,3s/^# //p' "$0" >&2
  exit 2
fi
target=$1 drafter=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
kind=$("$here/drafter_kind.sh" "$drafter" sglang)
drafts=${NUM_DRAFT_TOKENS:-$("$here/drafter_kind.sh" "$drafter" drafts)}
case $kind in
  EAGLE3) own=(--speculative-num-steps "$drafts" --speculative-eagle-topk 1 --speculative-num-draft-tokens $((drafts + 1))) ;;
  DFLASH) own=(--speculative-dflash-block-size $((drafts + 1))) ;;
  DSPARK) own=(--speculative-dspark-block-size "$drafts") ;;
esac
if [[ $kind == DSPARK && -f $drafter/calibration.json ]]; then # confidences choose how much is verified
  export SGLANG_RAGGED_VERIFY_MODE=${SGLANG_RAGGED_VERIFY_MODE:-compact}
  own+=(--speculative-dspark-confidence-sts-path "$drafter/calibration.json")
fi
exec python -m sglang.launch_server --model-path "$target" --speculative-algorithm "$kind" \
  --speculative-draft-model-path "$drafter" "${own[@]}" "$@"
