"""Generates the stubs in src/wald/v1, from the proto files of the repository or of the sdist."""

import shutil
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GenerateStubs(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version, build_data):
        root = Path(self.root)
        repository = root.parent.parent
        proto = next(
            (path for path in (root / "proto", repository / "proto") if (path / "wald/v1").is_dir()), None
        )
        if proto is None:
            raise FileNotFoundError("no proto files, neither here nor in the repository around client/python")
        if self.target_name == "sdist":
            build_data["force_include"][str(proto / "wald")] = "proto/wald"
            license = next(path for path in (root / "LICENSE", repository / "LICENSE") if path.is_file())
            build_data["force_include"][str(license)] = "LICENSE"
        else:
            generate(proto, root / "src")


def generate(proto, out):
    """The proto package is wald.v1, so the generated code lies inside the package and imports itself as such."""
    # The generator is only there while building.
    import grpc_tools
    from grpc_tools import protoc

    stubs = out / "wald/v1"
    shutil.rmtree(stubs, ignore_errors=True)
    files = sorted(str(path.relative_to(proto)) for path in proto.glob("wald/v1/*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"-I{proto}",
            f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            *files,
        ]
    )
    if status:
        raise RuntimeError(f"protoc failed with status {status}")
    (stubs / "__init__.py").write_text('"""The stubs, generated."""\n')
