"""From text to tokens: any corpus into Megatron's `.bin` and `.idx`.

From the ground up: `compressed` (a file's bytes, unpacked), `records` (what a task is: a bounded piece of input that
any process can turn into records), `huge` (documents too large for memory), `text_files` and `rows` (files to tasks),
`inputs` (patterns and names to parts of a corpus), `encode` (a task to tokens), `processes` (on all cores), `index` and
`work` (what is written, and how a killed command goes on), `ingest` (all of it), `merge` (pairs into one), `progress`.
"""
