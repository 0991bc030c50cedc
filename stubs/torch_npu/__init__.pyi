"""The part of torch-npu 2.14.0 that rd2h uses; the wheel ships no types."""

from torch_npu import npu as npu
