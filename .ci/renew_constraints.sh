#!/usr/bin/env bash
# Renew constraints.txt and requirements.lock: one resolution of the newest releases that
# pyproject.toml allows, for Linux and macOS and every Python from 3.11 on. Needs uv.
#
#     bash .ci/renew_constraints.sh           keeps torch at the release that constraints.txt has
#     TORCH=2.14.1 bash .ci/renew_constraints.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
torch=${TORCH:-$(sed -n 's/^torch==//p' constraints.txt)}
resolve() {
    uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate "$@"
}
# What the demo and the tests install. Extras named in constraints are an error of pip's.
echo "torch==$torch" | resolve --upgrade pyproject.toml - --extra dev -o constraints.txt
# What ServeCore needs, with the hashes of all files.
resolve --upgrade pyproject.toml --extra otel --generate-hashes --constraint constraints.txt \
    -o requirements.lock
