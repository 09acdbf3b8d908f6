"""What a run can do besides training steps: one file an ability (trainer.py has the hooks, pretrain.py the list)."""
