#!/bin/sh
# Lint, type-check and test in .venv; everything is installed by this command. Needs Python 3.10 or
# later with venv, no GPU. Arguments go to pytest: sh scripts/test.sh tests/test_embed.py
# Without arguments, all tests run of kernels that have changed since tests/data/verified.json and
# compiled.json were written, which `sh scripts/test.sh --verify` does when they pass; of other
# kernels, a sample.
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
.venv/bin/clang-format --dry-run -Werror cufa/kernels/*.cu cufa/kernels/*.cuh
.venv/bin/mypy

verify=
if [ "${1-}" = --verify ]; then
    verify=1
    shift
fi
if [ $# = 0 ]; then
    changed=$(.venv/bin/python tests/verified.py)
    [ -z "$changed" ] || echo "Kernels that have changed, with all their tests: $changed"
    set -- "--exhaustive=$changed"
elif [ "$verify" ]; then
    fail "--verify takes no other arguments: it runs all tests of the kernels that have changed"
fi
unset PYTHONDONTWRITEBYTECODE # workers, scripts and the next run share what is compiled
# One BLAS thread a worker: more would only fight over the cores.
OPENBLAS_NUM_THREADS=1 .venv/bin/pytest -n auto --maxprocesses 8 --dist worksteal "$@"
if [ "$verify" ] && [ -n "$changed" ]; then
    .venv/bin/python tests/verified.py write "$changed"
fi
