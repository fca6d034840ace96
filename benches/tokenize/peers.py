"""Times one tokenizer of PyPI in this process, on one thread: `peers.py PEER TOKENIZER.json DOCUMENTS PASSES [IDS]`.

DOCUMENTS: for each document its length in bytes (8, little-endian), then its UTF-8. Prints a JSON object: seconds of CPU time of
each pass, by this thread's clock and by the process's, the first pass with an empty cache; the number of tokens; the version. IDS
gets the ids of the last pass: for each document their number, then each, 4 bytes little-endian.
"""

import array
import importlib.metadata
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


def gigatoken(path):
    import gigatoken

    encode = gigatoken.Tokenizer.from_json(open(path).read()).encode
    return encode, lambda text: text


def fastokens(path):
    import fastokens

    tokenizer = fastokens.Tokenizer.from_file(path)
    # One document at a time, without an object for each token.
    flat = lambda text: memoryview(tokenizer.encode_batch_flat([text], split_special_tokens=True)[0]).cast("I")
    return flat, bytes.decode


def tokenizers(path):
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(path)
    if tokenizers.__version__.startswith("0."):
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        return lambda text: tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, bytes.decode
    options = {"add_special_tokens": False, "encode_special_tokens": True, "padding": None, "truncation": None}
    return lambda text: tokenizer.encode(text, **options).ids, bytes.decode


def main():
    peer, path, texts, passes = sys.argv[1:5]
    encode, prepare = {"gigatoken": gigatoken, "fastokens": fastokens, "tokenizers": tokenizers}[peer](path)
    texts = [prepare(text) for text in documents(texts)]
    thread, process, tokens = [], [], 0
    for _ in range(int(passes)):
        start = time.thread_time(), time.process_time()
        tokens = 0
        for text in texts:
            tokens += len(encode(text))
        thread.append(time.thread_time() - start[0])
        process.append(time.process_time() - start[1])
    if len(sys.argv) > 5:
        with open(sys.argv[5], "wb") as file:
            for text in texts:
                ids = array.array("I", list(encode(text)))
                file.write(len(ids).to_bytes(4, "little") + ids.tobytes())
    print(json.dumps({"thread": thread, "process": process, "tokens": tokens, "version": importlib.metadata.version(peer)}))


main()
