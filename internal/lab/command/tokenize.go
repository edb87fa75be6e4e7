package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/launch/progress"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/text/data"
)

// TokenizeOptions are the flags of `cprun tokenize`.
type TokenizeOptions struct {
	Tokenizer string // the path of a tokenizer.json or its directory, or bytes
	To        string // the files to write, without extension
	EOS       bool
	Quiet     bool
	Stdout    io.Writer
	Stderr    *os.File
}

// Tokenize writes the ids of text files as a .bin and .idx pair in Megatron's format.
func Tokenize(ctx context.Context, globs []string, o TokenizeOptions) (int, error) {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	paths, size, err := textFiles(globs)
	if err != nil {
		return 0, err
	}
	e, vocab, err := o.encoding()
	if err != nil {
		return 0, err
	}
	if o.To == "" {
		return 0, inputf("--to is missing: cprun tokenize --tokenizer T --to OUT FILE…")
	}
	pair, err := data.NewPair(o.To, vocab)
	if err != nil {
		return 0, inputf("--to: %w", err)
	}
	defer pair.Remove()
	meter := progress.NewMeter(o.Stderr, progress.Options{Quiet: o.Quiet, Terminal: launch.Terminal(o.Stderr)},
		"tokenize", size)
	defer meter.Close()
	e.Read, e.Ignored, e.Notes = meter.Add, &data.Keys{}, &data.Keys{}
	start := time.Now()
	err = o.write(ctx, e, paths, pair)
	meter.Close()
	if ctx.Err() != nil {
		fmt.Fprintln(o.Stderr, "stopped; nothing was written")
		return launch.ExitInterrupted, nil
	}
	if err != nil {
		return 0, err
	}
	for _, note := range e.Notes.Sorted() {
		fmt.Fprintln(o.Stderr, note)
	}
	if keys := e.Ignored.Sorted(); len(keys) > 0 {
		fmt.Fprintln(o.Stderr, unread(keys))
	}
	docs, tokens := pair.Counts()
	if !o.Quiet {
		took := time.Since(start)
		fmt.Fprintf(o.Stdout, "wrote %s and its .idx: %d documents, %d tokens, from %.1f MB in %s (%.1f MB/s)\n",
			pair.Paths()[1], docs, tokens, float64(size)/1e6, readable.Duration(took), float64(size)/1e6/took.Seconds())
	}
	return 0, nil
}

func (o *TokenizeOptions) write(ctx context.Context, e *data.Encoding, paths []string, pair *data.Pair) error {
	var failed error // error of a write
	err := e.Each(ctx, paths, func(file int, d data.Document) error {
		if d.Labels != nil {
			return fmt.Errorf("data file %s: token files cannot hold its labels; train on the .jsonl "+
				"itself", paths[file])
		}
		failed = pair.Add(d.IDs)
		return failed
	})
	if failed == nil && err != nil {
		return &InputError{err}
	}
	if err != nil {
		return err
	}
	if docs, _ := pair.Counts(); docs == 0 {
		return inputf("there is no text in the files")
	}
	return pair.Close()
}

func textFiles(globs []string) (paths []string, size int64, err error) {
	if len(globs) == 0 {
		return nil, 0, inputf("the files are missing: cprun tokenize --tokenizer T --to OUT FILE…")
	}
	for _, glob := range globs {
		found, text, err := data.Find(glob)
		if err != nil {
			return nil, 0, inputf("%s: %w", glob, err)
		}
		if !text {
			return nil, 0, inputf("%s: this is a token file already; name files of text or records", glob)
		}
		paths = append(paths, found...)
	}
	for _, path := range paths {
		st, err := os.Stat(path)
		if err != nil {
			return nil, 0, inputf("%w", err)
		}
		size += st.Size()
	}
	return paths, size, nil
}

// tokenizerFile returns the tokenizer.json in a directory, and any other path unchanged.
func tokenizerFile(path string) string {
	if st, err := os.Stat(path); path != data.Bytes && err == nil && st.IsDir() {
		return filepath.Join(path, "tokenizer.json")
	}
	return path
}

// encoding returns the encoding of text, and the size of its vocabulary.
func (o *TokenizeOptions) encoding() (e *data.Encoding, vocab int, err error) {
	path := o.Tokenizer
	switch {
	case path == "":
		return nil, 0, inputf("--tokenizer is missing: name a tokenizer.json or its directory, or write bytes")
	case path == data.Bytes:
		return &data.Encoding{Tokenizer: data.NewTokenizer(path, 0), EOS: -1, Vocab: 256}, 256, nil
	}
	path = tokenizerFile(path)
	dir := filepath.Dir(path)
	t, err := data.LoadTokenizer(path)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			err = errors.New("no such file; transformers writes one with " +
				"AutoTokenizer.from_pretrained(dir).save_pretrained(dir)")
		}
		return nil, 0, inputf("--tokenizer: %s: %w", path, err)
	}
	e = &data.Encoding{Tokenizer: data.UseTokenizer(t), EOS: -1, Vocab: t.Size()}
	if !o.EOS {
		return e, e.Vocab, nil
	}
	end, err := hf.FindEOS(path, dir)
	if note := end.Note(); note != "" && err == nil && !o.Quiet {
		fmt.Fprintf(o.Stderr, "cprun: --eos: %s\n", note)
	}
	if e.EOS = end.ID; err == nil && e.EOS < 0 {
		err = fmt.Errorf("no config.json, generation_config.json or tokenizer_config.json in %s names an EOS token",
			dir)
	}
	if err == nil && e.EOS >= e.Vocab {
		err = fmt.Errorf("the model's EOS is %d, and the tokenizer has %d tokens", e.EOS, e.Vocab)
	}
	if err != nil {
		return nil, 0, inputf("--eos: %w; to add no EOS token, pass --eos=false", err)
	}
	return e, e.Vocab, nil
}
