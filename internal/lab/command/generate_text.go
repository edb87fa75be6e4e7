package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model/tokenizer"
	"github.com/cprun/cprun/internal/run/generate"
)

// output returns the writer of the text: it keeps control characters from a terminal; a file or a pipe gets
// the text as the model writes it.
func (o *GenerateOptions) output() io.Writer {
	if launch.Terminal(o.Stdout) {
		return terminal.NewWriter(o.Stdout)
	}
	return o.Stdout
}

// printing writes tokens as text, as they come.
type printing struct {
	decoder *tokenizer.Decoder
	out     io.Writer
	buf     []byte
	unended bool // the output does not end with a line break
}

// all prints before, then the model's text.
func (p *printing) all(
	ctx context.Context, m *generate.Model, req generate.Request, before string,
) (generate.Report, error) {
	if err := p.write([]byte(before)); err != nil {
		return generate.Report{}, err
	}
	rep, err := m.Write(ctx, req, p.token)
	if err == nil {
		err = p.end()
	}
	return rep, err
}

func (p *printing) token(id int32) error { return p.write(p.decoder.Append(p.buf[:0], id)) }

// end writes the rest, and ends the line of a terminal.
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

// note prints a line beside the text.
func (o *GenerateOptions) note(line string) {
	if !o.Quiet {
		fmt.Fprintf(o.Stderr, "cprun: %s\n", terminal.Text(line))
	}
}

// report prints the speed, and why the text ends.
func (o *GenerateOptions) report(w *source, req generate.Request, rep generate.Report) {
	rate := func(n int, d time.Duration) string {
		return fmt.Sprintf("%s tokens in %.2f s (%.1f tokens/s)", readable.Count(int64(n)), d.Seconds(),
			float64(n)/max(d.Seconds(), 1e-9))
	}
	why := map[generate.End]string{
		generate.EndOfText: "the model ended the text", generate.EndTokens: "wrote --max-tokens tokens",
		generate.Interrupted: "interrupted",
		generate.EndRoom:     fmt.Sprintf("prompt and text are as long as the model's %d positions", w.positions),
	}
	line := fmt.Sprintf("prompt: %d tokens", len(req.Prompt)) // of one that was interrupted
	if rep.End != generate.Interrupted || rep.Tokens > 0 {
		line = fmt.Sprintf("prompt: %s; text: %s", rate(len(req.Prompt), rep.Prompt), rate(rep.Tokens, rep.Write))
	}
	o.note(line + "; " + why[rep.End])
}
