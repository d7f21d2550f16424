#!/usr/bin/env bash
# Serves a target with a drafter in llama.cpp: launch/serve_llamacpp.sh TARGET.gguf DRAFTER.gguf [NUM_DRAFT_TOKENS]
# NUM_DRAFT_TOKENS: 0 = no speculation; 4 unless given. HOST, PORT: 127.0.0.1, 8080 unless set.
# With llama-server on the PATH it is that, with its default settings but for the drafter; otherwise the PyPI package
# xllamacpp (make .venv/engines installs it), computing in float32 on the CPU.
set -euo pipefail
if (($# < 2)); then
  sed -n '2,5s/^# //p' "$0" >&2
  exit 2
fi
target=$1 drafter=$2 drafts=${3:-4} host=${HOST:-127.0.0.1} port=${PORT:-8080}
for file in "$target" "$drafter"; do
  if [[ ! -f $file ]]; then
    echo "$file: no such file; python export.py engine=gguf with_target=true writes both" >&2
    exit 2
  fi
done
case $(head -c 400 "$drafter" | tr -d '\0' | grep -aoE -m 1 'eagle3|dflash' | head -n 1) in
  eagle3) kind=draft-eagle3 ;;
  # Only one that predicts from the anchor has a Markov head, if of zeros.
  dflash) if grep -aq -m 1 'markov_w1.weight' "$drafter"; then kind=draft-dspark; else kind=draft-dflash; fi ;;
  *)
    echo "$drafter: neither of llama.cpp's architectures eagle3 and dflash" >&2
    exit 2
    ;;
esac
if command -v llama-server > /dev/null; then
  own=()
  ((drafts)) && own=(--spec-draft-model "$drafter" --spec-type "$kind" --spec-draft-n-max "$drafts")
  exec llama-server --model "$target" --host "$host" --port "$port" "${own[@]}"
fi
python=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/python
exec "$python" - "$target" "$drafter" "$drafts" "$kind" "$host" "$port" << 'EOF'
import signal
import sys

import xllamacpp as engine

target, drafter, drafts, kind, host, port = sys.argv[1:]
params = engine.CommonParams()
params.model.path, params.hostnames, params.port = target, [host], int(port)
params.n_parallel, params.n_ctx, params.verbosity = 1, 2048, 1
params.flash_attn_type = engine.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
parts = [params]
if int(drafts):
    draft = params.speculative.draft
    draft.mparams.path, draft.n_max = drafter, int(drafts)
    kinds = {one.name: one for one in engine.common_speculative_type}
    params.speculative.types = [kinds[f"COMMON_SPECULATIVE_TYPE_{kind.upper().replace('-', '_')}"]]
    parts.append(draft)
for part in parts:  # float16 by default
    part.cache_type_k = part.cache_type_v = engine.ggml_type.GGML_TYPE_F32
params.endpoint_props = True  # by which eval.py server= knows what runs
server = engine.Server(params)
print(f"serving {target} at {server.listening_address}", flush=True)
signal.sigwait([signal.SIGINT, signal.SIGTERM])
EOF
