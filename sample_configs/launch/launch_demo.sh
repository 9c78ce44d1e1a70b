#!/usr/bin/env bash
# Summarises FILE (default: a short text about bees) by map-reduce on this machine's CPU. Installs
# missing packages, starts ServeCore and one engine with the embedded model, shows the progress,
# writes the executed graph to demo_output/, and stops the servers.
#
#     bash sample_configs/launch/launch_demo.sh [FILE]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
bootstrap demo
exec "$PYTHON" -m parrot.cli demo "$@"
