package generate

import (
	"context"
	"slices"
	"time"
)

// End is why a text ends where it does.
type End string

const (
	EndOfText   End = "end of text" // the model wrote a token that ends one
	EndTokens   End = "all tokens"  // as many as were asked for
	EndRoom     End = "no room"     // the sequence is as long as it may be
	Interrupted End = "interrupted" // the context was cancelled
)

// Request is a text that a model is to write.
type Request struct {
	Prompt    []int32 // one token or more
	MaxTokens int     // new ones
	Ends      []int   // ids that end a text; they are not given
	Sampling  Sampling
}

// Report is how a text was written.
type Report struct {
	End    End
	Tokens int           // that were written
	Prompt time.Duration // until the prompt was read
	Write  time.Duration // from then on
}

// Write has a model that has read nothing read the prompt and write on. each gets every token as it
// comes. An interrupt is no error: the report says what was done.
func (m *Model) Write(ctx context.Context, r Request, each func(id int32) error) (Report, error) {
	var rep Report
	began := time.Now()
	logits, err := m.Read(ctx, r.Prompt)
	rep.Prompt = time.Since(began)
	began = time.Now()
	s := NewSampler(r.Sampling)
	for err == nil {
		if rep.End = m.end(r, rep.Tokens); rep.End != "" {
			break
		}
		var id int32
		if id, err = s.Next(logits); err != nil {
			break
		}
		if slices.Contains(r.Ends, int(id)) {
			rep.End = EndOfText
			break
		}
		if err = each(id); err != nil {
			break
		}
		if rep.Tokens++; m.end(r, rep.Tokens) == "" { // else nothing follows that would need its logits
			logits, err = m.Read(ctx, []int32{id})
		}
	}
	rep.Write = time.Since(began)
	if err != nil && ctx.Err() != nil {
		rep.End, err = Interrupted, nil
	}
	return rep, err
}

// end is why no token may follow so many new ones; "" where one may.
func (m *Model) end(r Request, tokens int) End {
	switch {
	case tokens >= r.MaxTokens:
		return EndTokens
	case len(r.Prompt)+tokens >= m.Room():
		return EndRoom
	}
	return ""
}
