//go:build !cuda

package worker

import (
	"context"

	"github.com/cprun/cprun/internal/run/bench"
)

// gpuTransports are none: this binary was built without the tag cuda.
func (p *process) gpuTransports(context.Context, *bench.Rank) ([]bench.Transport, func() error, error) {
	return nil, nil, nil
}
