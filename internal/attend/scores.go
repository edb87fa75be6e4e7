package attend

import (
	"context"
	"errors"
	"fmt"
	"slices"

	rules "github.com/cprun/cprun/attention/backends"
	"github.com/cprun/cprun/comm"
	"github.com/cprun/cprun/internal/device"
	"github.com/cprun/cprun/internal/safetensors"
	"github.com/cprun/cprun/tensor"
)

// Scores is what a case asks for beside scale, soft cap and mask.
type Scores struct {
	Sink rules.SoftmaxType // what a sink adds to the softmax's denominator
}

// scoreTensors are the tensors of Scores.
var scoreTensors = []string{"sink"}

// offByOne is the metadata "sink" of a constant sink of 0.
const offByOne = "off_by_one"

// scores reads what the file says of the scores. It is called when the lengths are known.
func (c *Case) scores() error {
	return errors.Join(c.sink())
}

func (c *Case) sink() error {
	word := c.file.Metadata()["sink"]
	switch {
	case c.has("sink") && word != "":
		return fmt.Errorf("%s: tensor \"sink\" stands beside metadata \"sink\" %.64q; leave one of them out", c.Path, word)
	case c.has("sink"):
		c.Scores.Sink = rules.Learnable
		return c.shaped("sink", c.Heads)
	case word == offByOne:
		c.Scores.Sink = rules.OffByOne
	case word != "":
		return fmt.Errorf("%s: metadata \"sink\" is %.64q; want %s, or a tensor \"sink\" [heads]", c.Path, word, offByOne)
	}
	return nil
}

// shaped is what is wrong with a tensor that is to be read and of that shape.
func (c *Case) shaped(name string, want ...int) error {
	shape, err := c.readable(name)
	if err == nil && !slices.Equal(shape, want) {
		err = fmt.Errorf("%s: tensor %q has shape %v; want %v", c.Path, name, shape, want)
	}
	return err
}

// sinks are the sinks of a case and their gradient, [1, 1, heads, 1].
type sinks struct {
	sink View // zero: there is none
	grad result
}

// loadSinks reads the sinks, which every rank has all of, in the type that LSE has.
func (c *Case) loadSinks(t tensor.DType, dev *device.Device) (s sinks, err error) {
	if c.Scores.Sink == rules.Vanilla {
		return s, nil
	}
	r, err := places(dev, t, [4]int{1, 1, c.Heads, 1})
	if err == nil && c.Scores.Sink == rules.Learnable {
		err = c.file.ReadInto("sink", r.host, 0)
	}
	if err != nil {
		return s, fmt.Errorf("sink: %w", err)
	}
	dev.Store.Upload(r.dev, r.host)
	s.sink = r.dev
	if c.dsink() {
		s.grad, err = places(dev, t, [4]int{1, 1, c.Heads, 1})
	}
	return s, err
}

// dsink reports whether the gradient of the sinks is a result.
func (c *Case) dsink() bool { return c.Scores.Sink == rules.Learnable && c.Backward }

// sumOverRanks is a result with a number for each head, of which every rank has a part.
func (c *Case) sumOverRanks(ctx context.Context, world comm.Communicator, name string, v View) (safetensors.Entry, error) {
	if err := wait(ctx)(world.AllReduce(v, comm.Sum)); err != nil {
		return safetensors.Entry{}, fmt.Errorf("adding up %s: %w", name, err)
	}
	return safetensors.Floats(name, safetensors.F32, []int{v.Len(tensor.Heads)}, floats(v)), nil
}
