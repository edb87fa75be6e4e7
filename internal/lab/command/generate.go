package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/data"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/tokenizer"
	"github.com/cprun/cprun/internal/run/generate"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// GenerateOptions are the flags of `cprun generate`.
type GenerateOptions struct {
	Prompt     *string // "-": standard input; nil: there is none
	PromptFile string  // in its place
	MaxTokens  int     // new ones
	Sampling   generate.Sampling
	Step       int64  // of the checkpoint of a run; 0: the newest
	Tokenizer  string // a tokenizer.json, its directory, or bytes; "": the model's own
	IgnoreEOS  bool
	Device     string // auto, cpu or cuda
	Echo       bool   // also prints the prompt
	Quiet      bool
	Stdin      io.Reader
	Stdout     *os.File // the text, and nothing else
	Stderr     io.Writer
}

// maxPrompt bounds a prompt, in bytes: far more than any model has positions for.
const maxPrompt = 64 << 20

// Generate lets the model of a run's checkpoint, or of a Hugging Face directory, continue a prompt.
func Generate(ctx context.Context, path string, o GenerateOptions) (int, error) {
	if err := o.check(); err != nil {
		return 0, err
	}
	text, err := o.prompt()
	if err != nil {
		return 0, err
	}
	// only now: a prompt that is typed can be left by Ctrl-C
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	err = o.generate(ctx, path, text)
	switch {
	case errors.Is(err, errInterrupted):
		return launch.ExitInterrupted, nil
	case err != nil && ctx.Err() != nil:
		o.note("stopped; nothing was written")
		return launch.ExitInterrupted, nil
	}
	return 0, err
}

// errInterrupted ends a text that was interrupted and reported.
var errInterrupted = errors.New("interrupted")

// generate continues a text. After an interrupt it does not wait for the pass under way.
func (o *GenerateOptions) generate(ctx context.Context, path, text string) error {
	w, err := openSource(ctx, path, o)
	if err != nil {
		return err
	}
	defer w.close()
	for _, line := range w.notes {
		o.note(line)
	}
	req, decoder, err := w.request(text, o)
	if err != nil {
		return err
	}
	tokens := min(len(req.Prompt)+req.MaxTokens, w.positions)
	dev, end, err := o.open(w, tokens)
	if err != nil {
		return err
	}
	m, err := generate.New(ctx, w.cfg, dev, tokens, func(p model.Param, dst []float32) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return w.read(ctx, p, dst)
	})
	if err != nil {
		return err
	}
	if !o.Echo {
		text = ""
	}
	p := printing{decoder: decoder, out: o.output()}
	rep, err := p.all(ctx, m, req, text)
	if p.unended && !o.Quiet {
		fmt.Fprintln(o.Stderr)
	}
	switch {
	case err != nil:
		return err
	case rep.End == generate.Interrupted:
		o.report(w, req, rep)
		return errInterrupted
	}
	o.report(w, req, rep)
	return end()
}

// check finds the faults of the flags.
func (o *GenerateOptions) check() error {
	switch {
	case o.Prompt == nil && o.PromptFile == "":
		return inputf("--prompt is missing: cprun generate RUN --prompt TEXT; - reads it from standard input, " +
			"--prompt-file from a file")
	case o.Prompt != nil && o.PromptFile != "":
		return inputf("--prompt and --prompt-file: one of them is the prompt")
	case o.MaxTokens < 1:
		return inputf("--max-tokens %d: want 1 or more", o.MaxTokens)
	case o.Step < 0:
		return inputf("--step %d: want the step of a checkpoint, or 0 for the newest", o.Step)
	}
	if err := o.Sampling.Check(); err != nil {
		return &InputError{err}
	}
	return nil
}

// prompt reads the prompt. A line break at the end of a file or a pipe is not part of it.
func (o *GenerateOptions) prompt() (string, error) {
	var text []byte
	var err error
	switch {
	case o.PromptFile != "":
		if text, err = files.Read(o.PromptFile, maxPrompt); err != nil {
			return "", inputf("--prompt-file: %w", err)
		}
	case *o.Prompt == "-":
		if text, err = io.ReadAll(io.LimitReader(o.Stdin, maxPrompt+1)); err != nil {
			return "", inputf("--prompt -: standard input: %w", err)
		}
		if len(text) > maxPrompt {
			return "", inputf("--prompt -: standard input has more than %d bytes", maxPrompt)
		}
	default:
		return *o.Prompt, nil
	}
	return string(bytes.TrimSuffix(bytes.TrimSuffix(text, []byte("\n")), []byte("\r"))), nil
}

// request returns the prompt's tokens, and a decoder for the tokens after them.
func (w *source) request(text string, o *GenerateOptions) (req generate.Request, d *tokenizer.Decoder, err error) {
	t := data.NewTokenizer(w.tokenizer, w.cfg.VocabSize)
	if req.Prompt, err = t.Encode(text); err == nil {
		d, err = t.NewDecoder()
	}
	if faulty := (*data.TokenizerError)(nil); errors.As(err, &faulty) {
		return req, nil, inputf("%w; --tokenizer names another one", err)
	}
	if err != nil {
		return req, nil, inputf("the prompt: %w", err)
	}
	if len(req.Prompt) == 0 {
		if w.begin < 0 {
			return req, nil, inputf("the prompt is empty, and the model has no token to begin a text with; give it " +
				"some text")
		}
		req.Prompt = []int32{int32(w.begin)}
	}
	for _, id := range req.Prompt {
		if int(id) >= w.cfg.VocabSize {
			return req, nil, inputf("the prompt: token id %d is not below vocab_size %d: the tokenizer is another "+
				"model's; --tokenizer names it", id, w.cfg.VocabSize)
		}
	}
	if n := len(req.Prompt); n >= w.positions {
		return req, nil, inputf("the prompt has %d tokens, and the model %d positions, which a text needs, too; "+
			"shorten it", n, w.positions)
	}
	for _, id := range req.Prompt {
		d.Append(nil, id)
	}
	d.Flush(nil)
	req.MaxTokens, req.Sampling = o.MaxTokens, o.Sampling
	if !o.IgnoreEOS {
		req.Ends = w.ends
	}
	return req, d, nil
}

// open takes the device of --device into use, if its memory holds the model and the keys and values of
// that many tokens. end closes it.
func (o *GenerateOptions) open(w *source, tokens int) (dev *device.Device, end func() error, err error) {
	m, err := found(o.Device)
	if err != nil {
		return nil, nil, err
	}
	weights, cache := generate.Bytes(w.cfg, tokens)
	if m.Memory > 0 && weights+cache > m.Memory {
		return nil, nil, inputf("%s: the weights take %.1f GB in float32, keys and values of %d tokens %.1f GB, and "+
			"this %s has %.1f GB; take a larger one, or fewer --max-tokens",
			w.what, float64(weights)/1e9, tokens, float64(cache)/1e9,
			map[bool]string{true: "machine", false: "GPU"}[m.IsCPU()], float64(m.Memory)/1e9)
	}
	if m.IsCPU() {
		stream := tensor.NewHostStream("compute")
		d := device.CPU(stream, "flash", tensor.F32)
		return &d, func() error { return errors.Join(d.Close(), stream.Close()) }, nil
	}
	q := plan.Question{Ranks: 1, PerHost: 1}
	for l := range w.cfg.NumHiddenLayers {
		q.Attentions = append(q.Attentions, backend.Request{
			Strategy: ring.Strategy{Layout: "contiguous", Algorithm: "ring"},
			DType:    tensor.F32, Batch: 1, SeqQ: tokens, SeqKV: tokens,
			Heads: w.cfg.NumAttentionHeads, KVHeads: w.cfg.NumKeyValueHeads,
			HeadDim: w.cfg.HeadDim, HeadDimV: w.cfg.HeadDim, Causal: true, Window: w.cfg.Window(l), Ranks: 1,
		})
	}
	answer, _, err := (&Options{Stderr: os.Stderr}).strategy(m, q)
	if err != nil {
		return nil, nil, err
	}
	d, err := device.CUDA(device.CUDAOptions{
		Backend: answer.Backend, Remedies: answer.Choice.Kinds(), Compute: tensor.F32, Machine: m,
		HeadDim: w.cfg.HeadDim, Note: o.note,
	})
	return &d, d.Close, err
}
