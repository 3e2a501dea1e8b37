"""vLLM as a generator: servers over HTTP (`remote`), or in this process (`in_process`). docs/vllm.md describes both.

`versions` has everything that differs between the supported versions of vLLM. vLLM itself is only imported inside
functions: a run that uses servers does not need it, unless weights travel by NCCL.
"""
