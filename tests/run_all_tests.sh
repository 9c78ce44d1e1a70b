#!/usr/bin/env bash
# Run the tests, also from a fresh clone. The script creates or uses a virtual environment, installs
# missing packages, and passes its arguments to pytest.
#
#     bash tests/run_all_tests.sh [--latest] [PYTEST ARGUMENTS]
#
# `--latest` as the first argument runs the tests with the newest releases of all dependencies
# instead of those in constraints.txt, in `.venv-latest`.
#
# Uses three workers for two cores, and at most four workers (`-n 0`: none), because tests wait for
# processes, connections and leases for 20% of the time. Each worker runs one test file at a time.
# A failed test is repeated once, since hundreds of tests run real processes in real time on shared
# machines. Tests that pass only then are listed as RERUN. Investigate them as defects.
# Coverage is measured on request (`--cov --cov-report=term:skip-covered`), because tracing makes
# interpreted kernels five times slower.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source sample_configs/launch/bootstrap.sh
if [ "${1:-}" = --latest ]; then
    shift
    bootstrap dev --latest
else
    bootstrap dev
fi
# Always keep compiled modules: hundreds of processes import the same ones, and compiling the test
# modules takes longer than collecting the tests.
unset PYTHONDONTWRITEBYTECODE
# One compute thread per test process. With more, the processes would compete for the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Skip loading the system's certificate authorities and searching all packages for pydantic plugins,
# which takes 0.15 s of CPU time per process. No test calls a public server.
export SSL_CERT_FILE="$PWD/tests/support/no_authority.pem" SSL_CERT_DIR=/nonexistent
export PYDANTIC_DISABLE_PLUGINS=1
workers=$("$PYTHON" -c 'import os; print(max(1, min(4, 3 * (os.cpu_count() or 1) // 2)))')
exec "$PYTHON" -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder \
    --reruns 1 -rR --durations=15 "$@"
