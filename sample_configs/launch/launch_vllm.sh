#!/usr/bin/env bash
# ServeCore and an engine that uses a running vLLM server: vllm serve Qwen/Qwen3-8B
#
#     bash sample_configs/launch/launch_vllm.sh [--log_dir DIR]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
bootstrap engine
exec "$PYTHON" -m parrot.cli launch \
    "$ROOT/sample_configs/core/localhost.json" \
    "$ROOT/sample_configs/engine/vllm.json" \
    "$@"
