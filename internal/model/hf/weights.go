package hf

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/base/terminal"
)

const (
	singleFile = "model.safetensors"
	indexFile  = "model.safetensors.index.json"

	adapterPickle = "adapter_model.bin" // of older versions of PEFT
	convertPickle = `python -c "import torch; from safetensors.torch import save_file; save_file({k: v.contiguous() ` +
		`for k, v in torch.load('` + adapterPickle + `', weights_only=True).items()}, '` + adapterFile + `')"`
)

// Weights are the open safetensors files of a model directory. Its methods may be called concurrently.
type Weights struct {
	path  string
	what  string // in errors
	needs string // the config that wants its tensors
	files []*os.File
	where map[string]*safetensors.File // by tensor
	names []string
	inner map[string]string // names in the files of tensors of a language model in a larger one, by their own names
	// beside has tensors of the parts in besides, by their names in the files.
	beside map[string]*safetensors.File
	means  sync.Map          // of the rows of resized tensors, by name
	index  map[string]string // files of tensors that are in no file, by the index
	note   string

	mixing sync.Mutex
	mixed  scattered // the last one read

	embedding, head string // the pair that a model may tie; "": none

	headers int64 // bytes of all headers
	tensors int   // in all files
}

// OpenWeights opens model.safetensors, or the shards of model.safetensors.index.json, and reads their headers. The
// caller closes it.
func OpenWeights(path string) (*Weights, error) { return openWeights(path, singleFile) }

// openWeights opens a file of a directory; without model.safetensors, the shards.
func openWeights(path, single string) (*Weights, error) {
	d, err := files.OpenRepo(path)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	w := &Weights{path: d.Path, what: "model directory " + d.Path, needs: "config.json",
		where: map[string]*safetensors.File{}, embedding: llamaNames[Embedding], head: llamaNames[Head]}
	if single != singleFile {
		w.what, w.needs, w.embedding, w.head = "adapter "+filepath.Join(d.Path, single), adapterConfig, "", ""
	}
	switch {
	case single != singleFile && !d.Exists(single) && d.Exists(adapterPickle):
		err = fmt.Errorf("%s: no such file; %s beside it is a pickle, which can run code and is not read. Convert it in "+
			"its directory: %s", filepath.Join(d.Path, single), adapterPickle, convertPickle)
	case single != singleFile || d.Exists(single):
		var s *safetensors.File
		if s, err = w.openShard(d, single); err == nil {
			for _, name := range s.Names() {
				w.where[name] = s
			}
		}
	case d.Exists(indexFile):
		err = w.openShards(d)
	default:
		err = fmt.Errorf("model directory %s: neither %s nor %s in it; model.from needs weights in safetensors", d.Path,
			singleFile, indexFile)
		if d.Exists("pytorch_model.bin") || d.Exists("pytorch_model.bin.index.json") {
			err = fmt.Errorf("%w; pytorch_model.bin is a pickle, which can run code and is not read: load it in "+
				"transformers and save_pretrained with safetensors", err)
		} else if id := hubName(d.Path); id != "" {
			err = fmt.Errorf("%w; fetch them: hf download %s", err, id)
		}
	}
	if err != nil {
		w.Close()
		return nil, err
	}
	w.unwrap()
	w.names = slices.Sorted(maps.Keys(w.where))
	return w, nil
}

// unwrap renames the tensors of a language model in a larger one, and drops the others. transformers 4 and 5 have
// different names: language_model.model.norm.weight and model.language_model.norm.weight.
func (w *Weights) unwrap() {
	w.inner, w.beside = map[string]string{}, map[string]*safetensors.File{}
	for stored := range w.where {
		if besides[partOf(stored)] {
			w.beside[stored] = w.where[stored]
		}
		own, newer := strings.CutPrefix(stored, nestedPrefix)
		if adapter, ok := strings.CutPrefix(stored, adapterPrefix+nestedPrefix); ok {
			own = adapterPrefix + basePrefix + adapter
		} else if newer {
			own = basePrefix + own
		} else if own, newer = strings.CutPrefix(stored, "language_model."); !newer {
			continue
		}
		w.inner[own] = stored
	}
	if len(w.inner) == 0 {
		return
	}
	for own, stored := range w.inner {
		w.where[own] = w.where[stored]
		delete(w.where, stored)
	}
	maps.DeleteFunc(w.where, func(name string, _ *safetensors.File) bool {
		part := partOf(name)
		return besides[part] && part != "mtp" || part == "multi_modal_projector"
	})
}

// stored returns the name of a tensor in its file.
func (w *Weights) stored(name string) string { return cmp.Or(w.inner[name], name) }

// find returns the name under which the files have a tensor; "" for none. As transformers 5 does, it also looks for the
// name with one "model." more or less, and for tied embeddings under the name of the head.
func (w *Weights) find(name string) string {
	for _, name := range []string{name, strings.TrimPrefix(name, basePrefix), basePrefix + name} {
		if w.where[name] != nil {
			return name
		}
	}
	if name == llamaNames[Embedding] {
		return w.find(llamaNames[Head])
	}
	return ""
}

const (
	basePrefix   = "model."
	nestedPrefix = "model.language_model." // of a language model in a larger one
)

// These bounds of a sharded model, which may link to one file many times, are descriptors and the memory of all
// headers. The largest known models have 200 shards and 10 MB of headers.
const (
	maxShards  = 2048
	maxHeaders = 2 * safetensors.MaxHeader
)

func (w *Weights) openShard(d *files.Repo, name string) (*safetensors.File, error) {
	f, err := d.Open(name)
	if err != nil {
		return nil, err
	}
	w.files = append(w.files, f)
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("model directory %s: %w", w.path, err)
	}
	s, err := safetensors.New(filepath.Join(d.Path, name), f, st.Size())
	if err != nil {
		return nil, err
	}
	w.headers += s.HeaderBytes()
	w.tensors += len(s.Names())
	if w.headers > maxHeaders || w.tensors > safetensors.MaxTensors {
		return nil, fmt.Errorf(
			"model directory %s: the headers up to %s have %d bytes and %d tensors; at most %d and %d "+
				"are read",
			w.path, terminal.Name(name), w.headers, w.tensors, maxHeaders, safetensors.MaxTensors)
	}
	return s, nil
}

// openShards opens the shards of the index. As transformers 5 does, it takes from the index only the names of files. A
// file may be absent: Check reports what the model needs of it.
func (w *Weights) openShards(d *files.Repo) (err error) {
	if w.index, err = readIndex(d); err != nil {
		return err
	}
	path := filepath.Join(w.path, indexFile)
	shards := slices.Compact(slices.Sorted(maps.Values(w.index)))
	if len(shards) > maxShards {
		return fmt.Errorf("%s: weight_map: it names %d files; at most %d are opened", path, len(shards), maxShards)
	}
	for _, file := range shards {
		s, err := w.openShard(d, file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("%s: weight_map: %w", path, err)
		}
		for _, tensor := range s.Names() {
			w.where[tensor] = s
		}
	}
	if len(w.files) == 0 {
		return fmt.Errorf("%s: weight_map: none of its files exists, such as %s; fetch the model again", path,
			terminal.Name(shards[0]))
	}
	maps.DeleteFunc(w.index, func(name, _ string) bool { return w.where[name] != nil })
	return nil
}

// readIndex returns the file of every tensor in the index.
func readIndex(d *files.Repo) (map[string]string, error) {
	raw, err := d.ReadJSON(indexFile, maxIndex, maxIndexValues)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(d.Path, indexFile)
	var index struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(raw, &index); err != nil {
		return nil, fmt.Errorf("%s: %s", path, terminal.Clip(err.Error(), 200))
	}
	if len(index.WeightMap) == 0 {
		return nil, fmt.Errorf("%s: weight_map: missing or empty", path)
	}
	return index.WeightMap, nil
}

// Close closes the files.
func (w *Weights) Close() error {
	var errs []error
	for _, f := range w.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// checksumPiece is the number of bytes that one goroutine hashes at a time.
const checksumPiece = 32 << 20

// Checksum returns the SHA-256 of the SHA-256 sums of the files' pieces, which it computes in parallel.
func (w *Weights) Checksum(ctx context.Context) (string, error) {
	whole := sha256.New()
	for _, f := range w.files {
		st, err := f.Stat()
		if err != nil {
			return "", err
		}
		sums := make([][sha256.Size]byte, (st.Size()+checksumPiece-1)/checksumPiece)
		g, ctx := errgroup.WithContext(ctx)
		g.SetLimit(runtime.GOMAXPROCS(0))
		for i := range sums {
			g.Go(func() error {
				if ctx.Err() != nil {
					return context.Cause(ctx)
				}
				h := sha256.New()
				_, err := io.Copy(h, io.NewSectionReader(f, int64(i)*checksumPiece, checksumPiece))
				h.Sum(sums[i][:0])
				return err
			})
		}
		if err := g.Wait(); err != nil {
			return "", fmt.Errorf("checksum of %s: %w", w.path, err)
		}
		for _, s := range sums {
			whole.Write(s[:])
		}
	}
	return hex.EncodeToString(whole.Sum(nil)), nil
}

// Check compares the files with the tensors of a model. The error lists missing and unknown tensors, wrong shapes and
// unsupported types, the first of each kind by name. Afterwards Note describes the tensors that the model does not
// need.
func (w *Weights) Check(want []Tensor) error {
	used := map[string]bool{}
	untied := slices.ContainsFunc(want, func(t Tensor) bool { return t.Name == w.head })
	var missing, shapes, types []string
	for _, t := range want {
		for _, p := range t.inFiles() {
			t, name := p.in, w.find(p.in.Name)
			if untied && t.Name == w.embedding && name == w.find(w.head) {
				name = "" // the model needs both
			}
			if name != "" && used[name] {
				continue
			}
			if w.isFP4(p) {
				blocks := w.find(t.Name + blocksSuffix)
				if err := w.checkFP4(p); err != nil && !used[blocks] {
					return err
				}
				used[blocks], used[w.find(t.Name+scalesSuffix)] = true, true
				continue
			}
			used[name] = true
			i, err := w.check(t)
			switch {
			case name == "" || i == nil:
				missing = append(missing, w.absent(t))
			case err == nil:
			case !slices.Equal(i.Shape, t.Shape):
				shapes = append(shapes, fmt.Sprintf("%.255q %v for %v", t.Name, i.Shape, t.Shape))
			default:
				types = append(types, fmt.Sprintf("%.255q %.64s", t.Name, i.DType))
			}
		}
	}
	more, other := w.unused(want, used)
	var out []string
	for _, k := range []struct {
		names []string
		say   string
	}{
		{missing, "missing: " + w.needs + " needs them"}, {shapes, "of another shape than " + w.needs + " needs"},
		{types, "of a type that is not read; convert to F64, F32, F16 or BF16"},
		{more, "not in the model of " + w.needs},
	} {
		if len(k.names) > 0 {
			out = append(out, tensorsNamed(k.names)+" "+k.say)
		}
	}
	if len(out) == 0 && !untied {
		if err := w.checkTied(want); err != nil {
			return err
		}
	}
	if len(missing) > 0 && w.find(w.head) == "" && untied {
		out = append(out, fmt.Sprintf("if the model has no output matrix %q of its own, set model.tie_word_embeddings to "+
			"true", w.head))
	}
	if len(out) > 0 {
		return fmt.Errorf("%s: %s", w.what, strings.Join(out, "\n  "))
	}
	if len(other) > 0 {
		w.note = fmt.Sprintf("%s: %s not needed and not read", w.what, tensorsNamed(other))
	}
	return nil
}

// Note returns a line on the tensors that Check found not to be needed; "" for none.
func (w *Weights) Note() string { return w.note }

// absent names a missing tensor, and its file if the index has one.
func (w *Weights) absent(t Tensor) string {
	text := fmt.Sprintf("%.255q %v", t.Name, t.fileShape())
	if file := w.index[t.Name]; file != "" {
		text += " (of " + terminal.Name(file) + ")"
	}
	return text
}

// unused lists the other tensors. inside has those of modules and layers of the model: without them it would compute
// something else. The head of a tied model and rotary_emb.inv_freq of old files are in neither list.
func (w *Weights) unused(want []Tensor, used map[string]bool) (inside, other []string) {
	module := func(name string) string {
		return strings.TrimPrefix(name[:strings.LastIndexByte(name, '.')+1], basePrefix)
	}
	layer := func(name string) string {
		parts := strings.SplitN(strings.TrimPrefix(name, basePrefix), ".", 3)
		return strings.Join(parts[:len(parts)-1], ".")
	}
	known := map[string]bool{}
	for _, t := range want {
		for _, p := range t.inFiles() {
			known[module(p.in.Name)], known[layer(p.in.Name)] = true, true
		}
	}
	delete(known, "")
	for _, name := range w.names {
		switch {
		case used[name] || name == w.find(w.head) || strings.HasSuffix(name, "rotary_emb.inv_freq"):
		case known[module(name)] || known[layer(name)]:
			inside = append(inside, fmt.Sprintf("%.255q", name))
		default:
			other = append(other, fmt.Sprintf("%.255q", name))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(w.index)) {
		if !used[w.find(name)] {
			other = append(other, fmt.Sprintf("%.255q (only in the index)", name))
		}
	}
	return inside, other
}

// checkTied compares the head in the files of a tied model with the embeddings. transformers 5 unties them if they
// differ.
func (w *Weights) checkTied(want []Tensor) error {
	embedding, head := w.embedding, w.find(w.head)
	at := slices.IndexFunc(want, func(t Tensor) bool { return t.Name == embedding })
	if head == "" || at < 0 || head == w.find(embedding) {
		return nil
	}
	if same, err := w.equal(want[at], head); err != nil || same {
		return err
	}
	return fmt.Errorf("%s: %q differs from %q, to which the model ties it: set model.tie_word_embeddings to false, or "+
		"remove the tensor", w.what, head, embedding)
}

// equal reports whether a tensor of another name has the same elements.
func (w *Weights) equal(t Tensor, name string) (bool, error) {
	const piece = 1 << 20
	other := Tensor{Name: name, Shape: t.Shape, FileRows: t.FileRows}
	for off, n := int64(0), int64(t.Size()); off < n; off += piece {
		a, b := make([]float32, min(piece, n-off)), make([]float32, min(piece, n-off))
		if err := errors.Join(w.Read(t, a, off), w.Read(other, b, off)); err != nil {
			return false, err
		}
		if !slices.Equal(a, b) {
			return false, nil
		}
	}
	return true, nil
}

const maxNames = 3

// tensorsNamed returns the subject of a sentence on tensors, with its verb.
func tensorsNamed(names []string) string {
	switch n := len(names); {
	case n == 1:
		return "tensor " + names[0] + " is"
	case n > maxNames:
		return fmt.Sprintf("%d tensors (%s and %d more) are", n, strings.Join(names[:maxNames], ", "), n-maxNames)
	}
	return "tensors " + strings.Join(names, ", ") + " are"
}

// check finds the faults of a tensor. It returns the tensor's entry in the file, or nil.
func (w *Weights) check(t Tensor) (*safetensors.Info, error) {
	name := w.find(t.Name)
	if name == "" {
		return nil, fmt.Errorf("%s: tensor %s is missing; %s needs it", w.what, w.absent(t), w.needs)
	}
	i, _ := w.where[name].Info(w.stored(name))
	if !slices.Equal(i.Shape, t.fileShape()) {
		return &i, fmt.Errorf("%s: tensor %q: shape %v, but %s needs %v", w.what, t.Name, i.Shape, w.needs, t.fileShape())
	}
	switch i.DType {
	case safetensors.F64, safetensors.F32, safetensors.F16, safetensors.BF16:
		return &i, nil
	}
	return &i, fmt.Errorf("%s: tensor %q: type %.64s is not supported; convert it to F64, F32, F16 or BF16", w.what,
		t.Name, i.DType)
}

// Read fills dst with the elements of a tensor, row-major, from element off. The file must have t.Shape, or
// t.FileRows, and every element must be finite.
func (w *Weights) Read(t Tensor, dst []float32, off int64) error {
	dst, err := w.fillMean(t, dst, off)
	if err != nil || len(dst) == 0 {
		return err
	}
	for p := range t.pieces(off, int64(len(dst))) {
		part := dst[p.at-off:][:p.n]
		if err := w.read(p, part); err != nil {
			return err
		}
		for i, x := range part {
			if x-x != 0 { // NaN or an infinity
				name := cmp.Or(w.find(p.in.Name), w.find(p.in.Name+blocksSuffix))
				return fmt.Errorf("%s: tensor %q: element %d is %v: the weights in the file are spoilt; fetch the model "+
					"again, or start from another", w.where[name].Name(), p.in.Name, p.start+p.off+int64(i), x)
			}
		}
	}
	return nil
}
