"""``torchtitan-npu list``: list the configs, models, converters and operators of this package."""
