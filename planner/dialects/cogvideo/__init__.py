"""The dialect of CogVideo's finetune scripts."""
