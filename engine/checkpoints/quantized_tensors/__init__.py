"""Readers of quantized tensors, one file per layout: codes and factors of slices."""

from __future__ import annotations

from typing import Any

from quire.engine.architecture.quantization.awq import AwqScheme
from quire.engine.architecture.quantization.bitsandbytes import BitsAndBytes4, BitsAndBytes8
from quire.engine.architecture.quantization.compressed_tensors import PackedScheme, Sparse24Scheme
from quire.engine.architecture.quantization.gguf import Gguf
from quire.engine.architecture.quantization.gptq import GptqScheme
from quire.engine.architecture.quantization.method import Scheme
from quire.engine.architecture.quantization.mxfp4 import MxFp4
from quire.engine.architecture.quantization.nvfp4 import NvFp4
from quire.engine.architecture.quantization.online import OnlineScheme
from quire.engine.architecture.quantization.torchao import TorchAoInt4
from quire.engine.architecture.quantization.unpacked import Unpacked
from quire.engine.checkpoints.quantized_tensors.awq import AwqReader
from quire.engine.checkpoints.quantized_tensors.bitsandbytes import BitsAndBytes4Reader, BitsAndBytes8Reader
from quire.engine.checkpoints.quantized_tensors.compressed_tensors import PackedReader, Sparse24Reader
from quire.engine.checkpoints.quantized_tensors.gguf import GgufReader
from quire.engine.checkpoints.quantized_tensors.gptq import GptqReader
from quire.engine.checkpoints.quantized_tensors.mxfp4 import MxFp4Reader
from quire.engine.checkpoints.quantized_tensors.nvfp4 import NvFp4Reader
from quire.engine.checkpoints.quantized_tensors.online import OnlineReader
from quire.engine.checkpoints.quantized_tensors.reader import Reader
from quire.engine.checkpoints.quantized_tensors.torchao import TorchAoInt4Reader
from quire.engine.checkpoints.quantized_tensors.unpacked import UnpackedReader

READERS: dict[type[Scheme], type[Reader[Any]]] = {
    AwqScheme: AwqReader,
    BitsAndBytes4: BitsAndBytes4Reader,
    BitsAndBytes8: BitsAndBytes8Reader,
    Gguf: GgufReader,
    GptqScheme: GptqReader,
    MxFp4: MxFp4Reader,
    NvFp4: NvFp4Reader,
    OnlineScheme: OnlineReader,
    TorchAoInt4: TorchAoInt4Reader,
    PackedScheme: PackedReader,
    Sparse24Scheme: Sparse24Reader,
    Unpacked: UnpackedReader,
}
"""The reader of each scheme's tensors."""
