"""The part of vllm-ascend 0.30.0rc2 that rd2h uses; it does not install without CANN."""
