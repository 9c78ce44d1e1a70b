#!/usr/bin/env bash
# A map-reduce summary of FILE (default: a short text about bees) on this machine's CPU:
# installs what is missing, starts ServeCore and one engine with the embedded model, shows what
# happens, writes the executed graph to demo_output/, and stops everything.
#
#     bash sample_configs/launch/launch_demo.sh [FILE]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
bootstrap demo
exec "$PYTHON" -m parrot.cli demo "$@"
