package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/foresee/backend"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/backends"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/run/generate"
	"github.com/cprun/cprun/internal/text/data"
	"github.com/cprun/cprun/internal/text/tokenizer"
	"github.com/cprun/cprun/ring"
	"github.com/cprun/cprun/tensor"
)

// GenerateOptions are the flags of `cprun generate`.
type GenerateOptions struct {
	Prompt     *string // "-": standard input; nil: there is none
	PromptFile string  // in its place
	Chat       string  // in its place: a message to answer, or a file with messages
	MaxTokens  int     // new ones
	Sampling   generate.Sampling
	Step       int64 // of the checkpoint of a run; 0: the newest one
	Set        []string
	Tokenizer  string // a tokenizer.json, its directory, or bytes; "": the model's own
	IgnoreEOS  bool
	Device     string // auto, cpu or cuda
	Echo       bool   // also prints the prompt
	Quiet      bool
	Stdin      io.Reader
	Stdout     *os.File // only the text
	Stderr     io.Writer
}

// maxPrompt bounds a prompt, in bytes, far above the positions of any model.
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
	// not earlier: while the user types a prompt, Ctrl-C ends the program
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

var errInterrupted = errors.New("interrupted")

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
	if err != nil {
		return err
	}
	o.report(w, req, rep)
	if rep.End == generate.Interrupted {
		return errInterrupted
	}
	return end()
}

func (o *GenerateOptions) check() error {
	switch {
	case o.Prompt == nil && o.PromptFile == "" && o.Chat == "":
		return inputf("--prompt is missing: cprun generate RUN --prompt TEXT; - reads it from standard input, " +
			"--prompt-file from a file; --chat takes a message to answer")
	case o.Prompt != nil && o.PromptFile != "" || o.Chat != "" && (o.Prompt != nil || o.PromptFile != ""):
		return inputf("--prompt, --prompt-file and --chat: pass one of them")
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
	case o.Chat != "":
		if st, err := os.Stat(o.Chat); err != nil || st.IsDir() {
			return o.Chat, nil
		}
		if text, err = files.Read(o.Chat, maxPrompt); err != nil {
			return "", inputf("--chat: %w", err)
		}
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

func (w *source) request(text string, o *GenerateOptions) (req generate.Request, d *tokenizer.Decoder, err error) {
	t := data.NewTokenizer(w.tokenizer, w.cfg.VocabSize)
	ends := w.ends
	if o.Chat == "" {
		req.Prompt, err = t.Encode(text)
	} else {
		var end int
		if req.Prompt, end, err = data.NewChat(w.tokenizer, w.template, false).Prompt(t, text); end >= 0 {
			ends = append(slices.Clone(ends), end)
		}
	}
	if err == nil {
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
			return req, nil, inputf("the prompt is empty, and the model has no token that begins a text; pass some " +
				"text")
		}
		req.Prompt = []int32{int32(w.begin)}
	}
	for _, id := range req.Prompt {
		if int(id) >= w.cfg.VocabSize {
			return req, nil, inputf("the prompt: token id %d is not below vocab_size %d, so the tokenizer is another "+
				"model's; name the right one with --tokenizer", id, w.cfg.VocabSize)
		}
	}
	if n := len(req.Prompt); n >= w.positions {
		return req, nil, inputf("the prompt has %d tokens, which leaves no room in the model's %d positions; "+
			"shorten it", n, w.positions)
	}
	for _, id := range req.Prompt {
		d.Append(nil, id)
	}
	d.Flush(nil)
	req.MaxTokens, req.Sampling = o.MaxTokens, o.Sampling
	if !o.IgnoreEOS {
		req.Ends = ends
	}
	return req, d, nil
}

// open opens the device of --device if its memory holds the model, and the keys and values of the tokens. end closes
// it.
func (o *GenerateOptions) open(w *source, tokens int) (dev *device.Device, end func() error, err error) {
	m, err := found(o.Device)
	if err != nil {
		return nil, nil, err
	}
	weights, cache := generate.Bytes(w.cfg, tokens)
	if m.Memory > 0 && weights+cache > m.Memory {
		owner := "GPU"
		if m.IsCPU() {
			owner = "machine"
		}
		return nil, nil, inputf("%s: the weights take %s in float32, keys and values of %d tokens %s, and this %s has "+
			"%s; use a larger one, or fewer --max-tokens",
			w.what, readable.Bytes(weights), tokens, readable.Bytes(cache), owner, readable.Bytes(m.Memory))
	}
	if m.IsCPU() {
		stream := tensor.NewHostStream("compute")
		d := device.CPU(stream, "flash", tensor.F32)
		return &d, func() error { return errors.Join(d.Close(), stream.Close()) }, nil
	}
	q := plan.Question{Ranks: 1, PerHost: 1}
	for _, mixer := range w.cfg.Mixers() {
		q.Attentions = append(q.Attentions, backend.Request{
			Strategy: ring.Strategy{Layout: "contiguous", Algorithm: "ring"},
			Params: backends.Params{
				DType: tensor.F32, Batch: 1, SeqQ: tokens, SeqKV: tokens,
				Heads: mixer.Heads, KVHeads: mixer.KVHeads, HeadDim: mixer.Dim, HeadDimV: mixer.DimV,
				Causal: true, WindowLeft: mixer.Window, Softcap: w.cfg.AttnLogitSoftcapping > 0,
			},
		})
	}
	answer, _, err := (&Options{Stderr: os.Stderr}).strategy(m, q)
	if err != nil {
		return nil, nil, err
	}
	d, err := device.CUDA(device.CUDAOptions{
		Backend: answer.Backend, Compute: tensor.F32, Machine: m,
		HeadDim: w.cfg.HeadDim, Note: o.note,
	})
	return &d, d.Close, err
}

type source struct {
	what      string // its name in errors
	cfg       *hf.Config
	positions int    // maximum length of prompt and text
	tokenizer string // bytes, or the path of a tokenizer.json
	template  string // a Jinja file; "": the tokenizer's own
	begin     int    // the token that replaces an empty prompt; -1: none
	ends      []int  // the tokens that end a text, own included
	own       []int  // end tokens from the model's config
	read      func(ctx context.Context, p model.Param, dst []float32) error
	close     func()
	notes     []string
}

// openSource opens the checkpoint of a run, or a Hugging Face directory, and checks its metadata.
func openSource(ctx context.Context, path string, o *GenerateOptions) (w *source, err error) {
	model, err := modelOf(path, o.Step)
	switch {
	case err != nil:
	case model == "":
		w, err = sourceOfRun(ctx, path, o)
	case len(o.Set) > 0:
		err = inputf("--set: %s is no run; remove the flag", terminal.Name(path))
	default:
		w, err = sourceOfModel(model)
	}
	if err != nil {
		return nil, err
	}
	if err := w.findTokenizer(o.Tokenizer); err != nil {
		w.close()
		return nil, err
	}
	return w, nil
}

func (w *source) findTokenizer(given string) error {
	whose := "its"
	if given != "" {
		w.tokenizer, whose = tokenizerFile(given), "the"
	}
	if w.tokenizer == "" {
		return inputf("%s: its tokenizer is unknown; pass --tokenizer with a tokenizer.json, its directory, or "+
			"bytes", w.what)
	}
	if w.tokenizer != data.Bytes {
		if _, err := os.Stat(w.tokenizer); err != nil {
			return inputf("%s: %s tokenizer %s does not exist; copy it there, or name one with --tokenizer", w.what, whose,
				terminal.Name(w.tokenizer))
		}
	}
	if w.tokenizer == data.Bytes { // a model's end-of-text token is no byte
		w.own = slices.DeleteFunc(w.own, func(id int) bool { return id < 256 })
	}
	w.ends = append(w.ends, w.own...)
	begins, err := w.cfg.SpecialIDs("bos_token_id")
	if err != nil {
		return inputf("%s: %w", w.what, err)
	}
	w.begin = -1
	if all := append(begins, w.ends...); len(all) > 0 && all[0] < w.cfg.VocabSize { // in training an EOS precedes a text
		w.begin = all[0]
	}
	return nil
}

func sourceOfModel(path string) (*source, error) {
	cfg, err := hf.ReadConfig(path)
	if err != nil {
		return nil, &InputError{err}
	}
	weights, err := hf.OpenWeights(path)
	if err != nil {
		return nil, &InputError{err}
	}
	w := &source{what: terminal.Name(path), cfg: cfg, positions: cfg.MaxPositionEmbedding,
		tokenizer: filepath.Join(path, "tokenizer.json"), close: func() { weights.Close() }}
	if err = weights.Check(cfg.Tensors()); err == nil {
		w.own, err = hf.Ends(path)
	}
	if err != nil {
		w.close()
		return nil, &InputError{err}
	}
	for _, note := range []string{cfg.Caveat().Msg, weights.Note()} {
		if note != "" {
			w.notes = append(w.notes, note)
		}
	}
	w.read = func(_ context.Context, p model.Param, dst []float32) error {
		return weights.Read(p.Tensor, dst, 0)
	}
	return w, nil
}

func sourceOfRun(ctx context.Context, path string, o *GenerateOptions) (w *source, err error) {
	c, skipped, err := ofStep(ctx, path, o.Step, orModel)
	if err != nil {
		return nil, err
	}
	cfg, initial, err := savedModel(ctx, c, o.Set)
	if err != nil {
		c.Close()
		return nil, &InputError{err}
	}
	w = &source{what: terminal.Name(c.Dir), cfg: exported(cfg), tokenizer: tokenizerOf(cfg),
		template: cfg.Data.ChatTemplate, notes: skipped}
	w.close = func() { c.Close(); initial.Close() }
	w.positions = w.cfg.MaxPositionEmbedding
	if id := cfg.Data.EOSTokenID; id >= 0 {
		w.ends = append(w.ends, id)
	}
	if w.own, err = w.cfg.SpecialIDs("eos_token_id"); err != nil {
		w.close()
		return nil, &InputError{err}
	}
	if ends, err := hf.Ends(cfg.Model.From); err == nil && cfg.Model.From != "" { // it may be gone
		w.own = append(w.own, ends...)
	}
	saved := initial.Saved(ctx, c, true)
	w.read = func(_ context.Context, p model.Param, dst []float32) error { return saved(p.Tensor, 0, dst) }
	return w, nil
}

// tokenizerOf returns the tokenizer of a run's text; "" if another program made its tokens.
func tokenizerOf(cfg *config.Config) string {
	if cfg.Data.Tokenizer == config.Bytes && cfg.Model.From == "" && !ofBytes(cfg) {
		return ""
	}
	return cfg.Data.Tokenizer
}

// output returns the writer of the text. It strips control characters for a terminal, but not for a file or pipe.
func (o *GenerateOptions) output() io.Writer {
	if launch.Terminal(o.Stdout) {
		return terminal.NewWriter(o.Stdout)
	}
	return o.Stdout
}

type printing struct {
	decoder *tokenizer.Decoder
	out     io.Writer
	buf     []byte
	unended bool // the output does not end with a line break
}

func (p *printing) all(
	ctx context.Context, m *generate.Model, req generate.Request, before string,
) (generate.Report, error) {
	if err := p.write([]byte(before)); err != nil {
		return generate.Report{}, err
	}
	rep, err := m.Write(ctx, req, func(id int32) error { return p.write(p.decoder.Append(p.buf[:0], id)) })
	if err == nil {
		err = p.end()
	}
	return rep, err
}

func (p *printing) end() error {
	err := p.write(p.decoder.Flush(p.buf[:0]))
	if t, ok := p.out.(*terminal.Writer); ok && err == nil {
		_, err = t.Write([]byte("\n"))
		err = errors.Join(err, t.Flush())
		p.unended = false
	}
	return err
}

func (p *printing) write(text []byte) error {
	p.buf = text[:0]
	if len(text) == 0 {
		return nil
	}
	if _, err := p.out.Write(text); err != nil {
		return fmt.Errorf("standard output: %w", err)
	}
	p.unended = text[len(text)-1] != '\n'
	return nil
}

func (o *GenerateOptions) note(line string) {
	if !o.Quiet {
		fmt.Fprintf(o.Stderr, "cprun: %s\n", terminal.Text(line))
	}
}

func (o *GenerateOptions) report(w *source, req generate.Request, rep generate.Report) {
	rate := func(n int, d time.Duration) string {
		return fmt.Sprintf("%s in %.2f s (%s)", readable.Counted(n, "token"), d.Seconds(),
			readable.Rate(float64(n)/max(d.Seconds(), 1e-9)))
	}
	why := map[generate.End]string{
		generate.EndOfText: "the model ended the text", generate.EndTokens: "stopped at --max-tokens",
		generate.Interrupted: "interrupted",
		generate.EndRoom:     fmt.Sprintf("stopped at the model's last position, %d", w.positions),
	}
	line := "prompt: " + readable.Counted(len(req.Prompt), "token") // interrupted in the prompt
	if rep.End != generate.Interrupted || rep.Tokens > 0 {
		line = fmt.Sprintf("prompt: %s; text: %s", rate(len(req.Prompt), rep.Prompt), rate(rep.Tokens, rep.Write))
	}
	o.note(line + "; " + why[rep.End])
}
