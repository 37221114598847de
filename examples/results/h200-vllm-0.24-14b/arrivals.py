"""Poisson arrivals with log-normal lengths: arrivals.py REQUESTS_PER_S SECONDS SEED INPUT OUTPUT > trace.csv"""
import random, sys
rate, seconds, seed, inputs, outputs = map(float, sys.argv[1:])
R, t = random.Random(int(seed)), 0.0
def drawn(mean, sigma, low, high): return min(max(round(R.lognormvariate(0, sigma) * mean / 2.718281828 ** (sigma * sigma / 2)), low), high)
print("timestamp,input_tokens,output_tokens")
while (t := t + R.expovariate(rate)) < seconds: print(f"{t:.4f},{drawn(inputs, .6, 32, 6000)},{drawn(outputs, .5, 8, 600)}")
