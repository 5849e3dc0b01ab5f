#!/usr/bin/env bash
# A model that transformers 5 has read from a GGUF file cannot be saved, although its weights are float32.
#
# transformers converts the quantized tensors of a GGUF file to numbers while it loads; its page about GGUF says
# that the model is in float32 then, for further training. With 4.57.4 `save_pretrained` writes it. 5.19.0 keeps
# `quantization_config` and a quantizer on the model, and says that it is quantized and not serializable. After
# `del model.config.quantization_config; model.hf_quantizer = None` it saves, and reads back, the same weights.
#
# Seen on 2026-11-29:
#   transformers 4.57.4: torch.float32, saved and read back
#   transformers 5.19.0: torch.float32, ValueError: The model is quantized with QuantizationMethod.GGUF and is
#     not serializable; without the marks: saved and read back
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --target "$folder/base" torch==2.13.0 gguf==0.19.0 accelerate==1.15.0
for version in 4.57.4 5.19.0; do
  python3 -m pip install --quiet --disable-pip-version-check --target "$folder/$version" "transformers==$version"
done
cat > "$folder/try.py" <<'P'
import sys, gguf, numpy as np, torch, transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
folder = sys.argv[1]
width, ffn, vocabulary = 64, 128, 96
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=width, intermediate_size=ffn, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, vocab_size=vocabulary, max_position_embeddings=32,
)
source = LlamaForCausalLM(config)
writer = gguf.GGUFWriter(f"{folder}/tiny.gguf", "llama")
writer.add_block_count(1)
writer.add_context_length(32)
writer.add_embedding_length(width)
writer.add_feed_forward_length(ffn)
writer.add_head_count(2)
writer.add_head_count_kv(2)
writer.add_layer_norm_rms_eps(1e-6)
writer.add_rope_freq_base(10000.0)
writer.add_vocab_size(vocabulary)
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
for name, value in source.state_dict().items():
    base = names.get_name(name.removesuffix(".weight"))
    array = value.numpy()
    if array.ndim == 2:
        quantized = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"{base}.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    else:
        writer.add_tensor(f"{base}.weight", array)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf", dtype=torch.float32)

def saved_and_read() -> None:
    model.save_pretrained(f"{folder}/saved")
    again = AutoModelForCausalLM.from_pretrained(f"{folder}/saved", dtype=torch.float32)
    pairs = zip(model.state_dict().items(), again.state_dict().items())
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)

said = f"transformers {transformers.__version__}: {model.dtype}, "
try:
    saved_and_read()
except ValueError as error:
    assert transformers.__version__ == "5.19.0" and "not serializable" in str(error), error
    del model.config.quantization_config
    model.hf_quantizer = None
    saved_and_read()
    why = str(error).partition(" - ")[0]
    print(f"{said}{type(error).__name__}: {why}; without the marks: saved and read back")
else:
    assert transformers.__version__ == "4.57.4", "it saves now"
    print(f"{said}saved and read back")
P
for version in 4.57.4 5.19.0; do
  mkdir "$folder/model_$version"
  PYTHONPATH=$folder/$version:$folder/base python3 "$folder/try.py" "$folder/model_$version" 2>"$folder/log" ||
    { tail -3 "$folder/log"; exit 1; }
done
