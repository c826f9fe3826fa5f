#!/bin/sh
# Build the documentation in .venv, with no network once everything is installed; a warning is an
# error. The site is build/docs/index.html. Needs Python 3.10 or later with venv.
set -eu
cd "$(dirname "$0")/.."
. scripts/venv.sh

make_venv
install docs

# Pages of an earlier build must not hide one that is gone.
rm -rf build/docs
.venv/bin/python -m sphinx --fail-on-warning --keep-going --quiet --jobs auto --builder html docs build/docs
echo "Documentation: build/docs/index.html"
