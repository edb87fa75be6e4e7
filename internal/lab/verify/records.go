package verify

import (
	"bufio"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/text/chat"
	"github.com/cprun/cprun/internal/text/data"
)

// This file reads the records of a config a second time. It shares the list of files and the tokenizer with package
// data, but neither its parsers of files and records, nor its cuts into documents and samples.

// A Row is a token of a sample: its id, target (-1: none), position and document.
type Row struct{ ID, Target, Position, Document int32 }

// A window is the tokens of a sample, and one more.
type window struct {
	sample, lo  int64
	ids, labels []int32
	begins      []bool // a document begins here
	filled      int
}

// rows cuts a window into documents.
func (w *window) rows(packed bool) []Row {
	rows := make([]Row, len(w.ids)-1)
	position, doc := int32(0), int32(0)
	for i := range rows {
		if packed && i > 0 && w.begins[i] {
			position, doc = 0, doc+1
		}
		rows[i] = Row{w.ids[i], w.labels[i+1], position, doc}
		if w.labels[i+1] == ignored || packed && w.begins[i+1] {
			rows[i].Target = -1
		}
		position++
	}
	return rows
}

const ignored = -100 // the label of a token that is no target

// Records returns the rows of samples, by the records of data.path. Samples after their end have none.
func Records(cfg *config.Config, length int, samples []int64) (map[int64][]Row, error) {
	r := &reader{cfg: cfg, tok: data.NewTokenizer(cfg.Data.Tokenizer, cfg.Model.VocabSize), length: int64(length)}
	left := slices.Clone(samples)
	slices.Sort(left)
	left = slices.Compact(left)
	out := map[int64][]Row{}
	sources := [][]string{cfg.Data.Path.Globs()}
	if cfg.Data.Path.Mixed() { // each has samples of its own
		sources = slices.Collect(slices.Chunk(cfg.Data.Path.Globs(), 1))
	}
	first := int64(0) // samples of the sources before
	for _, globs := range sources {
		tokens, err := r.source(globs, left, first)
		if err != nil {
			return nil, err
		}
		for _, w := range r.windows {
			if w.filled == len(w.ids) {
				out[w.sample] = w.rows(cfg.Data.PackDocuments)
			}
		}
		first += max(0, tokens-1) / r.length
		left = slices.DeleteFunc(left, func(s int64) bool { return out[s] != nil })
	}
	return out, nil
}

// A reader passes over the tokens of a source, and fills windows.
type reader struct {
	cfg     *config.Config
	tok     *data.Tokenizer
	length  int64
	windows []*window
	at      int64   // tokens of the source so far
	cut     bool    // the next token follows an EOS token that ends a document
	whole   *finder // in place of windows; nil: documents are cut

	talk *talk // the present one
}

// source reads files, in which the samples count from first. It returns the number of tokens.
func (r *reader) source(globs []string, samples []int64, first int64) (int64, error) {
	r.windows, r.at, r.cut = nil, 0, false
	for _, s := range samples {
		n := r.length + 1
		r.windows = append(r.windows, &window{sample: s, lo: (s - first) * r.length, ids: make([]int32, n),
			labels: make([]int32, n), begins: make([]bool, n)})
	}
	for _, glob := range globs {
		paths, _, err := data.Find(glob)
		if err != nil {
			return 0, err
		}
		for _, path := range paths {
			if err := r.file(path); err != nil {
				return 0, fmt.Errorf("data file %s: %w", path, err)
			}
			if r.whole != nil {
				r.whole.end()
			}
		}
	}
	return r.at, nil
}

func (r *reader) file(path string) error {
	kind, err := kindOf(path)
	if err != nil {
		return err
	}
	switch n := 0; kind {
	case "tokens":
		return r.tokens(path)
	case "json", "parquet", "arrow":
		record := func(o *chat.Dict) error {
			n++
			if err := r.record(o); err != nil {
				return fmt.Errorf("record %d: %w", n, err)
			}
			return nil
		}
		if kind == "parquet" {
			return parquetRows(path, record)
		} else if kind == "arrow" {
			return arrowRows(path, record)
		}
		_, err := unpacked(path, func(in io.Reader) (struct{}, error) { return struct{}{}, objects(in, record) })
		return err
	}
	text, err := unpacked(path, io.ReadAll)
	if err != nil || len(text) == 0 {
		return err
	}
	if r.cfg.Data.Tokenizer != data.Bytes {
		return r.document(string(text))
	}
	ids := make([]int32, len(text))
	for i, b := range text {
		ids[i] = int32(b)
	}
	if r.cfg.Data.EOSTokenID < 0 {
		r.add(ids, nil, func(i int) bool { return i == 0 })
		return nil
	}
	r.stream(append(ids, int32(r.cfg.Data.EOSTokenID)))
	return nil
}

// add appends tokens to the source. begins tells the first tokens of documents.
func (r *reader) add(ids, labels []int32, begins func(i int) bool) {
	if labels == nil {
		labels = ids
	}
	if r.whole != nil {
		r.whole.add(ids, labels, begins)
	}
	for _, w := range r.windows {
		lo, hi := max(w.lo, r.at), min(w.lo+r.length+1, r.at+int64(len(ids)))
		for t := lo; t < hi; t++ {
			i, k := t-w.lo, int(t-r.at)
			w.ids[i], w.labels[i], w.begins[i] = ids[k], labels[k], begins(k)
			w.filled++
		}
	}
	r.at, r.cut = r.at+int64(len(ids)), true
}

// stream adds tokens with documents that end at the EOS token.
func (r *reader) stream(ids []int32) {
	cut := r.cut
	after := func(i int) bool {
		if i == 0 {
			return cut
		}
		return int(ids[i-1]) == r.cfg.Data.EOSTokenID
	}
	r.add(ids, nil, after)
	r.cut = after(len(ids))
}

// document adds a text with the EOS token.
func (r *reader) document(text string) error {
	if text == "" {
		return nil
	}
	ids, err := r.tok.Encode(text)
	if err != nil {
		return err
	}
	eos := int32(r.cfg.Data.EOSTokenID)
	if eos >= 0 && (len(ids) == 0 || ids[len(ids)-1] != eos || r.cfg.Data.Tokenizer == data.Bytes) {
		ids = append(ids, eos)
	}
	r.add(ids, nil, func(i int) bool { return i == 0 })
	return nil
}

// unpacked reads a file that may be compressed.
func unpacked[T any](path string, read func(io.Reader) (T, error)) (t T, err error) {
	f, err := files.Open(path)
	if err != nil {
		return t, err
	}
	defer f.Close()
	switch strings.ToLower(filepath.Ext(path)) {
	case ".gz":
		z, err := gzip.NewReader(f)
		if err != nil {
			return t, err
		}
		return read(z)
	case ".zst":
		z, err := zstd.NewReader(f, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(128<<20))
		if err != nil {
			return t, err
		}
		defer z.Close()
		return read(z)
	}
	return read(f)
}

// completion adds a prompt and completion of text.
func (r *reader) completion(prompt, completion string) error {
	before, err := r.tok.Encode(prompt)
	if err != nil {
		return err
	}
	ids, err := r.tok.Encode(prompt + completion)
	if err != nil {
		return err
	}
	eos := int32(r.cfg.Data.EOSTokenID)
	if eos >= 0 && (completion == "" || len(ids) == 0 || ids[len(ids)-1] != eos) {
		ids = append(ids, eos)
	}
	labels := answer(ids, before)
	if r.cfg.Data.TrainOn == "all" {
		labels = ids
	}
	r.add(ids, labels, func(i int) bool { return i == 0 })
	return nil
}

// answer returns labels that begin where ids differ from those of a prompt.
func answer(ids, prompt []int32) []int32 {
	labels := slices.Clone(ids)
	for i := 0; i < min(len(ids), len(prompt)) && ids[i] == prompt[i]; i++ {
		labels[i] = ignored
	}
	return labels
}

// record adds a record: of text, of ids, of a prompt and completion, or of messages.
func (r *reader) record(o *chat.Dict) error {
	format := r.cfg.Data.Format
	if format == "" || format == "auto" {
		for _, f := range [][2]string{{"completion", "completion"}, {"conversations", "messages"}, {"messages", "messages"},
			{"input_ids", "tokens"}, {"text", "text"}} { // the last one that the record has
			if o.Data[f[0]] != nil {
				format = f[1]
			}
		}
	}
	switch format {
	case "text":
		text, _ := o.Data["text"].(string)
		return r.document(text)
	case "tokens":
		return r.ids(o)
	case "completion":
		prompt, isText := o.Data["prompt"].(string)
		if completion, both := o.Data["completion"].(string); isText && both {
			return r.completion(prompt, completion)
		}
	}
	return r.messages(o, format)
}

// ids adds a record of ids, cut into the pieces of another packer.
func (r *reader) ids(o *chat.Dict) error {
	list, err := listOf(o, "input_ids")
	if err != nil {
		return err
	}
	n := len(list)
	padding, err := listOf(o, "attention_mask")
	if zero := slices.Index(padding, 0); zero >= 0 {
		n = zero
	}
	labels := slices.Clone(list)
	if own, bad := listOf(o, "labels"); own != nil || bad != nil {
		labels, err = own, errors.Join(err, bad)
	}
	for _, key := range []string{"completion_mask", "loss_mask", "assistant_masks"} {
		mask, bad := listOf(o, key)
		for i := range mask {
			if mask[i] == 0 && i < len(labels) {
				labels[i] = ignored
			}
		}
		err = errors.Join(err, bad)
	}
	starts, bad := pieces(o)
	if err = errors.Join(err, bad); err != nil || len(labels) < n {
		return errors.Join(err, io.ErrUnexpectedEOF)
	}
	r.add(list[:n], labels[:n], func(i int) bool { return i == 0 || contains(starts, i) })
	return nil
}

func contains[T int | int64](sorted []T, x T) bool {
	_, found := slices.BinarySearch(sorted, x)
	return found
}

// pieces returns the places in a record of ids where documents begin.
func pieces(o *chat.Dict) (starts []int, err error) {
	read := func(key string) []int32 {
		list, bad := listOf(o, key)
		err = errors.Join(err, bad)
		return list
	}
	at := 0
	for _, n := range read("seq_lengths") {
		starts, at = append(starts, at), at+int(n)
	}
	for _, end := range read("cu_seqlens") {
		starts = append(starts, int(end))
	}
	for _, key := range []string{"document_ids", "segment_ids"} {
		list := read(key)
		for i := range list {
			if i > 0 && list[i] != list[i-1] {
				starts = append(starts, i)
			}
		}
	}
	for i, position := range read("position_ids") {
		if position == 0 {
			starts = append(starts, i)
		}
	}
	slices.Sort(starts)
	return slices.Compact(starts), err
}

// listOf returns a list of integers; nil if the key is absent.
func listOf(o *chat.Dict, key string) (list []int32, err error) {
	v, ok := o.Data[key].([]chat.Value)
	if !ok && o.Data[key] != nil {
		return nil, fmt.Errorf("%q is no list", key)
	}
	for _, x := range v {
		switch {
		case x == false:
			x = 0
		case x == true:
			x = 1
		}
		n, ok := x.(int)
		if !ok {
			return nil, fmt.Errorf("%q has an entry that is no integer", key)
		}
		list = append(list, int32(n))
	}
	return list, nil
}

// chunkTokens is the number of tokens of a token file in memory at once.
const chunkTokens = 64 << 10

// tokens reads a token file of llm.c, or of Megatron if it has an index.
func (r *reader) tokens(path string) error {
	f, err := files.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	t := tokenFile{r: f, size: st.Size()}
	if x, err := files.Open(strings.TrimSuffix(path, ".bin") + ".idx"); err == nil {
		defer x.Close()
		err = t.megatron(bufio.NewReader(x))
		if err != nil {
			return fmt.Errorf("its index: %w", err)
		}
	} else if err := t.llmc(); err != nil {
		return err
	}
	byIndex := t.indexed
	if byIndex && r.cfg.Data.PackDocuments && r.cfg.Data.EOSTokenID >= 0 {
		found, err := t.contains(int32(r.cfg.Data.EOSTokenID))
		if err != nil {
			return err
		}
		byIndex = !found
	}
	return r.chunks(&t, byIndex)
}

// chunks adds the tokens of a file. It skips those outside all windows, unless their ends of documents matter.
func (r *reader) chunks(t *tokenFile, byIndex bool) error {
	for lo := int64(0); lo < t.count(); lo += chunkTokens {
		n := min(chunkTokens, t.count()-lo)
		near := func(w *window) bool { return w.lo <= r.at+n && w.lo+r.length+1 >= r.at }
		if r.whole == nil && !slices.ContainsFunc(r.windows, near) {
			r.at += n
			continue
		}
		ids, err := t.read(lo, n)
		switch {
		case err != nil:
			return err
		case byIndex:
			r.add(ids, nil, func(i int) bool { return contains(t.starts, lo+int64(i)) })
		default:
			r.stream(ids)
		}
	}
	return nil
}

// A tokenFile is integers of one width.
type tokenFile struct {
	r       io.ReaderAt
	size    int64 // bytes
	header  int64
	width   int64
	signed  bool
	indexed bool
	starts  []int64 // of documents, by the index
}

func (t *tokenFile) count() int64 { return (t.size - t.header) / t.width }

// llmc reads a header of 256 integers.
func (t *tokenFile) llmc() error {
	var h [4]byte
	if _, err := t.r.ReadAt(h[:], 0); err != nil {
		return err
	}
	t.header, t.width = 1024, 2
	if binary.LittleEndian.Uint32(h[:]) == 20240801 {
		t.width = 4
	}
	return nil
}

// megatron reads an index: the type, the lengths of sequences, and the first sequence of each document.
func (t *tokenFile) megatron(r io.Reader) error {
	var h struct {
		Magic                [9]byte
		Version              uint64
		Type                 uint8
		Sequences, Documents uint64
	}
	le := binary.LittleEndian
	if err := binary.Read(r, le, &h); err != nil {
		return err
	}
	t.indexed = true
	t.width = map[uint8]int64{1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}[h.Type]
	t.signed = h.Type >= 2 && h.Type <= 4
	if t.width == 0 {
		return fmt.Errorf("type %d", h.Type)
	}
	lengths, pointers, first := make([]int32, h.Sequences), make([]int64, h.Sequences), make([]int64, h.Documents)
	for _, list := range []any{lengths, pointers, first} {
		if err := binary.Read(r, le, list); err != nil {
			return err
		}
	}
	starts := []int64{0} // of sequences
	for k, n := range lengths {
		starts = append(starts, starts[k]+int64(n))
	}
	for _, k := range first {
		t.starts = append(t.starts, starts[k])
	}
	return nil
}

func (t *tokenFile) read(lo, n int64) ([]int32, error) {
	raw := make([]byte, n*t.width)
	if _, err := t.r.ReadAt(raw, t.header+lo*t.width); err != nil && err != io.EOF {
		return nil, err
	}
	ids := make([]int32, n)
	for i := range ids {
		var wide [8]byte
		copy(wide[:], raw[int64(i)*t.width:int64(i+1)*t.width])
		id := int64(binary.LittleEndian.Uint64(wide[:]))
		if shift := 64 - 8*t.width; t.signed {
			id = id << shift >> shift
		}
		ids[i] = int32(id)
	}
	return ids, nil
}

func (t *tokenFile) contains(id int32) (bool, error) {
	for lo := int64(0); lo < t.count(); lo += chunkTokens {
		ids, err := t.read(lo, min(chunkTokens, t.count()-lo))
		if err != nil || slices.Contains(ids, id) {
			return err == nil, err
		}
	}
	return false, nil
}
