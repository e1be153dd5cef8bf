"""Build step: eplb-service without the modules that eplb-agent ships, with the model that its demo serves."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildService(build_py):
    """``build_py`` that leaves ``eplb_service/__init__.py`` to eplb-agent, so that no file is in two wheels."""

    def run(self) -> None:
        """Build as usual, and add the demo's model, which no inference container needs."""
        super().run()
        if not self.editable_mode:
            model = Path("worker_agent", "model", "byte-moe")
            self.copy_tree(str(model), str(Path(self.build_lib) / model))

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """The modules of one package that eplb-service ships."""
        found = super().find_package_modules(package, package_dir)
        return [entry for entry in found if entry[:2] != ("eplb_service", "__init__")]


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildService})
