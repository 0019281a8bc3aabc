"""vLLM's KV connector: `"kv_connector_module_path": "spectrumkv.vllm"`, `"kv_connector": "SpectrumKVConnector"`.

The class needs vLLM and is imported when it is asked for; the parts below it (settings, steps, scheduler, worker, courier) do not.
"""

from typing import Any

__all__ = ["SpectrumKVConnector"]


def __getattr__(name: str) -> Any:
    if name == "SpectrumKVConnector":
        from spectrumkv.vllm.connector import SpectrumKVConnector

        return SpectrumKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
