#!/usr/bin/env bash
# ServeCore and Llama-3.1-8B on one GPU. The weights need a hub login (HF_TOKEN).
#
#     bash sample_configs/launch/launch_llama_3_1_8b.sh [--log_dir DIR]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
bootstrap engine
exec "$PYTHON" -m parrot.cli launch \
    "$ROOT/sample_configs/core/localhost.json" \
    "$ROOT/sample_configs/engine/llama_3_1_8b.json" \
    "$@"
