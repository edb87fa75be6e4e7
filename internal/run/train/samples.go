package train

import (
	"context"
	"fmt"
	"slices"

	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/internal/run/generate"
	"github.com/cprun/cprun/internal/text/data"
)

// An answerer answers the prompts of log.samples with the weights of the run. Each rank computes whole answers: a pass
// gathers sharded weights, in which all ranks take part. Rank 0 chooses the tokens, since ranks may round differently.
type answerer struct {
	tokens  *data.Tokenizer
	model   *generate.Model
	prompts []prompt
}

type prompt struct {
	text string
	ids  []int32
	ends []int // tokens that end the answer
}

// promptsOf encodes the prompts of log.samples.
func promptsOf(cfg *config.Config, tok *data.Tokenizer) (list []prompt, err error) {
	chat := slices.ContainsFunc(cfg.Data.Path, func(f config.File) bool { return f.Kind == data.FormatMessages })
	for _, text := range cfg.Log.Samples.Prompts {
		p := prompt{text: text, ends: []int{cfg.Data.EOSTokenID}}
		if chat {
			var end int
			p.ids, end, err = chatOf(cfg).Prompt(tok, text)
			p.ends = append(p.ends, end)
		} else {
			p.ids, err = tok.Encode(text)
		}
		beyond := slices.ContainsFunc(p.ids, func(id int32) bool { return int(id) >= cfg.Model.VocabSize })
		switch {
		case err != nil:
		case len(p.ids) == 0:
			err = fmt.Errorf("it is empty; write some text")
		case len(p.ids) > config.MaxPrompt:
			err = fmt.Errorf("it has %d tokens, and the most is %d; shorten it", len(p.ids), config.MaxPrompt)
		case beyond:
			err = fmt.Errorf("it has tokens beyond vocab_size %d: the tokenizer is another model's", cfg.Model.VocabSize)
		}
		if err != nil {
			return nil, fmt.Errorf("prompt %q: %w", text, err)
		}
		list = append(list, p)
	}
	return list, nil
}

func (t *Trainer) openAnswerer() (a *answerer, err error) {
	cfg := t.cfg
	a = &answerer{tokens: tokenizerOf(cfg)}
	if a.prompts, err = promptsOf(cfg, a.tokens); err != nil {
		return nil, fmt.Errorf("log.samples: %w", err)
	}
	longest := 0
	for _, p := range a.prompts {
		longest = max(longest, len(p.ids))
	}
	// no more rows than in training, for which the arena has room
	rows := max(1, cfg.Train.MicroBatchSize*cfg.Data.SeqLen/cfg.Parallel.Context)
	a.model, err = generate.Over(&cfg.Model.Config, t.dev, t.share.Params(), model.Options{
		Hooks: model.Hooks{Use: t.share.use},
	}, t.arena, longest+config.MaxAnswer, rows)
	return a, err
}

// answersAfter reports whether answers follow the n-th step.
func (r *run) answersAfter(n int) bool {
	every := r.cfg.Log.Samples.Every
	return every > 0 && (n%every == 0 || n == r.cfg.Train.Steps)
}

// maxShown bounds a prompt and an answer in the metrics, in bytes. Even at six bytes each in JSON, a line with
// config.MaxPrompts of them has less than the 64 KiB that readers accept.
const maxShown = 512

// answers answers all prompts. No step may be queued.
func (r *run) answers(ctx context.Context) (list []metrics.Sample, err error) {
	defer device.Caught(&err)
	r.opts.report(Report{Kind: Phase, Text: "samples", Step: int64(r.step)})
	r.share.label.begin("samples after step %d", r.step)
	defer r.share.label.end()
	for _, p := range r.answerer.prompts {
		text, err := r.answer(ctx, p)
		if err != nil {
			return nil, fmt.Errorf("log.samples: %w", err)
		}
		s := metrics.Sample{Prompt: terminal.Clip(p.text, maxShown), Text: terminal.Clip(text, maxShown)}
		r.opts.notice(fmt.Sprintf("sample after step %d: %q -> %q", r.step, s.Prompt, s.Text))
		list = append(list, s)
	}
	return list, r.share.idle(0)
}

func (r *run) answer(ctx context.Context, p prompt) (string, error) {
	m, world := r.answerer.model, r.mesh.world
	m.Reset()
	d, err := r.answerer.tokens.NewDecoder()
	if err != nil {
		return "", err
	}
	for _, id := range p.ids { // the text of a token depends on those before it
		d.Append(nil, id)
	}
	var text []byte
	likeliest, read := generate.NewSampler(generate.Sampling{TopP: 1}), p.ids
	for range config.MaxAnswer {
		logits, err := m.Read(ctx, read)
		if err != nil {
			return "", err
		}
		id := int32(-1) // the end
		if world.Rank() == 0 {
			if next, err := likeliest.Next(logits); err == nil && !slices.Contains(p.ends, int(next)) {
				id = next // logits that are not finite end the answer; the next step reports them
			}
		}
		agreed, err := maximum(ctx, world, float64(id))
		if err != nil {
			return "", err
		}
		if agreed[0] < 0 {
			break
		}
		read = []int32{int32(agreed[0])}
		text = d.Append(text, read[0])
	}
	return string(d.Flush(text)), nil
}
