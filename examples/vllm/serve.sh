#!/usr/bin/env bash
# Serve a model for `groupwise train examples/vllm/gsm8k.toml`: serve.sh MODEL [more options of vllm serve]
# The routes that load weights have no password unless --api-key is given, so the server listens on this machine only.
# On a CPU add: --no-enable-chunked-prefill --hf-overrides '{"tie_word_embeddings": false}' (docs/vllm.md says why).
set -euo pipefail
model=${1:?usage: serve.sh MODEL [options of vllm serve]}
shift
export VLLM_SERVER_DEV_MODE=1
exec python -m vllm.entrypoints.openai.api_server --model "$model" --host 127.0.0.1 --port 8000 \
  --logprobs-mode processed_logprobs --max-model-len 512 "$@"
