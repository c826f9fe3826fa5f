#!/bin/sh
# Lint, type-check and test in .venv; everything is installed by this command. Needs Python 3.10 or
# later with venv, no GPU. Arguments go to pytest: sh scripts/test.sh tests/test_embed.py
set -eu
cd "$(dirname "$0")/.."
. scripts/venv.sh

make_venv
# On a GPU machine the CUDA libraries come along, so that the tests marked gpu run too. The test
# extra compiles with CUDA 13; under an older driver those tests are skipped.
case $(cuda_extra) in
cuda13) install test,cuda13 ;;
*) install test ;;
esac

.venv/bin/ruff check
.venv/bin/ruff format --check
.venv/bin/mypy
# One BLAS thread a worker: more would only fight over the cores.
OPENBLAS_NUM_THREADS=1 .venv/bin/pytest -n auto --maxprocesses 8 --dist worksteal "$@"
