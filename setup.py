"""Put the folder train_configs into the package, as torchtitan_npu/train_configs. All else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["torchtitan_npu*"]), "torchtitan_npu.train_configs"],
    package_dir={"torchtitan_npu.train_configs": "train_configs"},
)
