"""Prompts, conversations, pictures, environments and rewards, without devices

`datasets` reads records, `prompts` and `conversations` make samples of them, `messages` renders chat
templates. `final_answer` and `graders` find and grade answers; `rewards` calls scorers in processes of their
own; `judge` asks a model. `environments` are for episodes of several turns.
"""
