#!/bin/sh
# Embed a few hundred sentences with all-MiniLM-L6-v2 on cufa.attention and search them by meaning;
# then add numbers with a small Llama.
# Needs Python 3.10 or later with venv; uses the GPU where there is one. Run from anywhere.
set -eu
cd "$(dirname "$0")/.."
. scripts/venv.sh

make_venv
cuda=$(cuda_extra)
install "embed,generate${cuda:+,$cuda}"

echo "Searching scripts/data/sentences.txt by meaning (device: ${cuda:-cpu})"
"$VENV_PYTHON" scripts/embed.py scripts/data/sentences.txt \
    --query "how do plants make their food" \
    --query "I am locked out of my account" \
    --query "the economy is getting worse" \
    --query "something sweet to bake on a rainy afternoon"

echo
echo "Adding with the small Llama of scripts/data/adder: a sum's digits from the last, then the sum"
"$VENV_PYTHON" scripts/generate.py scripts/data/adder "47+84=" "2748+6385=" "9999+1="
