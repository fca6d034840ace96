"""Times a tokenizer of PyPI in this process, on one thread: `peers.py gigatoken TOKENIZER.json DOCUMENTS PASSES`.

DOCUMENTS: for each document its length in bytes (8, little-endian), then its UTF-8. Prints a JSON object: seconds of CPU time of
each pass, the first with an empty cache, and the number of tokens of a pass.
"""

import json
import sys
import time


def documents(path):
    data = open(path, "rb").read()
    at, found = 0, []
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        found.append(data[at + 8 : at + 8 + length])
        at += 8 + length
    return found


def main():
    peer, tokenizer, path, passes = sys.argv[1:]
    if peer != "gigatoken":
        sys.exit(f"unknown peer {peer}")
    import gigatoken

    encode = gigatoken.Tokenizer.from_json(open(tokenizer).read()).encode
    texts = documents(path)
    seconds, tokens = [], 0
    for _ in range(int(passes)):
        start = time.thread_time()
        tokens = sum(len(encode(text)) for text in texts)
        seconds.append(time.thread_time() - start)
    print(json.dumps({"seconds": seconds, "tokens": tokens}))


main()
