#!/usr/bin/env bash
# ServeCore and an engine that uses OpenAI's API. Needs OPENAI_API_KEY.
#
#     bash sample_configs/launch/launch_openai.sh [--log_dir DIR]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
[ -n "${OPENAI_API_KEY:-}" ] || die "set OPENAI_API_KEY first"
bootstrap engine
exec "$PYTHON" -m parrot.cli launch \
    "$ROOT/sample_configs/core/localhost.json" \
    "$ROOT/sample_configs/engine/openai.json" \
    "$@"
