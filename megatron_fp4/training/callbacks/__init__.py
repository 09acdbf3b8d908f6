"""The features of a run besides training steps, one file each. trainer.py has the hooks, pretrain.py the list."""
