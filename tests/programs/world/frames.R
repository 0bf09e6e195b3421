# A model and an aggregation over columns. Usage: Rscript frames.R ROWS
rows <- as.integer(commandArgs(TRUE)[1])
set.seed(1)
d <- data.frame(g = sample(1000L, rows, TRUE), x = runif(rows), y = runif(rows))
d$z <- d$x * 3 - d$y + (d$g %% 7) / 10
fit <- lm(z ~ x + y, d)
sums <- rowsum(d$z, d$g)
ordered <- d[order(d$x, d$g), ]
cat(sprintf("%.9f", c(coef(fit), sums[500], ordered$z[c(1, rows %/% 2, rows)])), "\n")
