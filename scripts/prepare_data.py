"""Make a training set and a validation set in Megatron's format from your own text.

    python scripts/prepare_data.py --format json --files 'corpus/*.jsonl.zst' --output /data/web --tokenizer bpe.json
    python scripts/prepare_data.py --format parquet --files 'shards/**/*.parquet' --field content --output /data/web \\
        --tokenizer /data/tokenizer.json --train-tokenizer 32768
    python scripts/prepare_data.py --dataset NAME --split 'train[:1%]' --output /data/web --tokenizer tokenizer.json
    python scripts/prepare_data.py merge --inputs /data/web_0 /data/web_1 '/data/more/*.idx' --output /data/web
    python scripts/prepare_data.py check '/data/web_*' list.yaml s3://bucket/code --vocab-size 32768

Writes OUTPUT.bin, OUTPUT.idx, OUTPUT.json and the same of OUTPUT_validation, and prints what to tell pretrain.py.
Nothing is overwritten, and nothing appears before all is done. Until then it is in OUTPUT.parts: the same command again
resumes there, whatever ended it. See docs/data.md.

Exit codes: 0 done; 1 a process that tokenizes was killed; 2 the input or the command is wrong; 130 interrupted. Each
but 0 is told in one line on stderr.
"""

from __future__ import annotations

import signal
import sys

from data.prepare.command import main
from megatron_fp4.runtime.closed_pipe import end_without_reader
from megatron_fp4.runtime.errors import error_line

if __name__ == "__main__":
    end_without_reader()
    # As Ctrl-C: what is done is kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:], __doc__ or "", error_line))
